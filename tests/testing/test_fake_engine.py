"""What hosts build their tests on: the fake engine and the idle check."""

from __future__ import annotations

import pytest

from qwen3_asgi.config import EngineConfig, SamplingParams
from qwen3_asgi.testing import FakeExecutor, assert_idle, fake_engine
from tests.engine.engines import LONG, Gate, executor, expected, tokens, toy_engine
from tests.text.toy import toy_tokenizer


def test_it_generates_deterministic_tokens_without_a_model() -> None:
    with fake_engine(tokenizer=toy_tokenizer()) as engine:
        outputs = [engine.generate_sync(prompt="hello", params=tokens(9)) for _ in range(2)]
        assert outputs[0].token_ids == outputs[1].token_ids
        assert len(outputs[0].token_ids) == 9
        assert_idle(engine)


def test_it_takes_a_configuration_and_ends_at_eos_on_demand() -> None:
    fake = FakeExecutor(num_kv_blocks=16, block_size=16, vocab_size=256)
    config = EngineConfig(max_batch=1, served_model_name="stub")
    with fake_engine(fake, config, tokenizer=toy_tokenizer()) as engine:
        assert engine.model_name == "stub"
        assert engine.load().kv_total_blocks == 16
        handle = engine.submit_sync(prompt_token_ids=[1, 2], params=SamplingParams(max_tokens=50))
        fake.eos_after[handle.request_id] = 3
        batches = list(handle.read_sync())
        assert batches[-1].finish is not None
        assert batches[-1].finish.reason in ("stop", "length")
        plain = engine.generate_sync(prompt_token_ids=[1, 2], params=tokens(4))
        assert list(plain.token_ids) == expected([1, 2], 4)


def test_assert_idle_tells_what_is_left() -> None:
    fake = executor()
    gate = Gate(fake)
    engine = toy_engine(fake)
    try:
        handle = engine.submit_sync(prompt="hello", params=LONG)
        gate.held_sync(1)
        with pytest.raises(AssertionError, match="num_running=1"):
            assert_idle(engine, timeout=0.01)
        handle.cancel()
        gate.open()
        assert_idle(engine)
    finally:
        gate.open()
        engine.stop_sync(drain=0)
    assert_idle(engine)
