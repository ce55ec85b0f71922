"""What `generate`, `stream` and `submit` return, and what they refuse."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from qwen3_asgi.config import EngineConfig, SamplingParams
from qwen3_asgi.errors import ContextLengthExceeded, EngineOverloaded, InvalidRequest
from qwen3_asgi.scheduler.plan import RequestId, SampledToken, StepPlan, StepResult
from qwen3_asgi.testing import FakeExecutor
from tests.engine.engines import (
    VOCAB,
    Gate,
    executor,
    expected,
    running,
    settle,
    tokens,
    toy_engine,
)
from tests.text.toy import toy_tokenizer

pytestmark = pytest.mark.anyio


class WithLogprobs(FakeExecutor):
    """Gives every token the log-probability that was asked for."""

    def step(self, plan: StepPlan) -> StepResult:
        result = super().step(plan)
        wanted = {row.request_id: row.sample.sampling for row in plan.rows if row.sample}
        made: dict[RequestId, SampledToken] = {}
        for request_id, token in result.tokens.items():
            count = wanted[request_id].logprobs
            top = tuple((token.token_id, -0.5) for _ in range(count or 0))
            made[request_id] = (
                token if count is None else token._replace(logprob=-0.5, top_logprobs=top)
            )
        return StepResult(made, result.errors)


async def test_generate_returns_the_whole_output() -> None:
    async with running(toy_engine()) as engine:
        output = await engine.generate(prompt_token_ids=[5, 6, 7], params=tokens(9))
        assert list(output.token_ids) == expected([5, 6, 7], 9)
        assert output.text == toy_tokenizer().decode(output.token_ids)
        assert (output.finish_reason, output.stop_reason) == ("length", None)
        assert (output.prompt_tokens, output.cached_tokens, output.logprobs) == (3, 0, None)
        assert output.request_id
        await settle(engine)


async def test_stream_yields_what_generate_returns() -> None:
    async with running(toy_engine()) as engine:
        whole = await engine.generate(prompt="hello", params=tokens(50))
        deltas = [delta async for delta in engine.stream(prompt="hello", params=tokens(50))]
        assert "".join(delta.text for delta in deltas) == whole.text
        assert tuple(i for delta in deltas for i in delta.token_ids) == whole.token_ids
        assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
        assert deltas[-1].finish_reason == "length"
        assert all(delta.logprobs is None for delta in deltas)


async def test_messages_go_through_the_chat_template() -> None:
    async with running(toy_engine()) as engine:
        messages = [{"role": "user", "content": "hi"}]
        handle = await engine.submit(messages=messages, params=tokens(1), enable_thinking=False)
        assert handle.prompt_token_ids == toy_tokenizer().encode_chat(
            messages, enable_thinking=False
        )
        handle.cancel()


async def test_a_stop_string_ends_the_text_before_it() -> None:
    async with running(toy_engine()) as engine:
        whole = await engine.generate(prompt="hello", params=tokens(60))
        stop = whole.text[20:23]
        params = SamplingParams(max_tokens=60, ignore_eos=True, stop=(stop,))
        output = await engine.generate(prompt="hello", params=params)
        streamed = [delta async for delta in engine.stream(prompt="hello", params=params)]
        assert output.text == whole.text[: whole.text.index(stop)]
        assert "".join(delta.text for delta in streamed) == output.text
        assert (output.finish_reason, output.stop_reason) == ("stop", stop)
        assert output.token_ids == whole.token_ids[: len(output.token_ids)]
        assert len(output.token_ids) < 60


async def test_a_stop_token_is_counted_but_is_not_part_of_the_text() -> None:
    answer = expected([5, 6, 7], 20)
    stop = answer[9]
    length = answer.index(stop) + 1
    async with running(toy_engine()) as engine:
        params = SamplingParams(max_tokens=20, ignore_eos=True, stop_token_ids=(stop,))
        output = await engine.generate(prompt_token_ids=[5, 6, 7], params=params)
        assert list(output.token_ids) == answer[:length]
        assert output.text == toy_tokenizer().decode(answer[: length - 1])
        assert (output.finish_reason, output.stop_reason) == ("stop", stop)


@pytest.mark.parametrize("count", [0, 3])
async def test_logprobs_are_none_or_one_per_token(count: int) -> None:
    fake = WithLogprobs(num_kv_blocks=64, block_size=16, vocab_size=VOCAB)
    async with running(toy_engine(fake)) as engine:
        plain = await engine.generate(prompt="hello", params=tokens(7))
        params = SamplingParams(max_tokens=7, ignore_eos=True, logprobs=count)
        output = await engine.generate(prompt="hello", params=params)
        assert plain.logprobs is None
        assert output.logprobs is not None
        assert tuple(entry.token_id for entry in output.logprobs) == output.token_ids
        assert {entry.logprob for entry in output.logprobs} == {-0.5}
        assert {len(entry.top_logprobs) for entry in output.logprobs} == {count}
        async for delta in engine.stream(prompt="hello", params=params):
            assert delta.logprobs is not None
            assert tuple(entry.token_id for entry in delta.logprobs) == delta.token_ids


async def test_a_seed_is_passed_on_and_an_absent_one_is_drawn_per_request() -> None:
    fake = executor()
    gate = Gate(fake, open=True)
    seen = []
    async with running(toy_engine(fake)) as engine:
        for seed in (7, 7, None, None):
            params = SamplingParams(max_tokens=1, seed=seed, temperature=1.0)
            await engine.generate(prompt="hello", params=params)
            assert gate.plan is not None
            sample = gate.plan.rows[0].sample
            assert sample is not None
            seen.append(sample.sampling.seed)
    assert seen[:2] == [7, 7]
    assert len(set(seen)) == 3


@pytest.mark.parametrize(
    ("arguments", "param"),
    [
        ({}, "prompt"),
        ({"prompt": "a", "messages": []}, "prompt"),
        ({"prompt": "a", "prompt_token_ids": [1]}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": "\ud800"}, "prompt"),
        ({"prompt_token_ids": []}, "prompt"),
        ({"prompt_token_ids": [1, 99_999]}, "prompt"),
        ({"prompt_token_ids": [-1]}, "prompt"),
        ({"prompt_token_ids": [1.0]}, "prompt"),
        ({"prompt_token_ids": ["1"]}, "prompt"),
        ({"prompt_token_ids": [None]}, "prompt"),
        ({"messages": [{"role": "nobody", "content": "x"}]}, "messages"),
        ({"messages": "hello"}, "messages"),
    ],
)
async def test_wrong_arguments_are_refused(arguments: dict[str, Any], param: str) -> None:
    async with running(toy_engine()) as engine:
        with pytest.raises(InvalidRequest) as caught:
            await engine.generate(**arguments)
        assert caught.value.param is not None
        assert caught.value.param.startswith(param)
        with pytest.raises(InvalidRequest):
            async for _ in engine.stream(**arguments):
                pass
        await settle(engine)


async def test_numpy_token_ids_are_token_ids() -> None:
    numpy = pytest.importorskip("numpy")
    async with running(toy_engine()) as engine:
        output = await engine.generate(prompt_token_ids=numpy.array([5, 6, 7]), params=tokens(3))
        assert list(output.token_ids) == expected([5, 6, 7], 3)


async def test_what_can_never_fit_is_refused_at_once() -> None:
    async with running(toy_engine(executor(max_context_tokens=100))) as engine:
        with pytest.raises(ContextLengthExceeded) as caught:
            await engine.generate(prompt="x" * 90, params=tokens(20))
        assert "100" in str(caught.value)
        assert caught.value.param == "prompt"
        whole = await engine.generate(
            prompt_token_ids=[1] * 90, params=SamplingParams(ignore_eos=True)
        )
        assert len(whole.token_ids) == 10


async def test_a_full_queue_is_an_overload_and_never_waits() -> None:
    fake = executor()
    gate = Gate(fake)
    config = EngineConfig(max_batch=2, max_queue=3)
    async with running(toy_engine(fake, config), gate) as engine:
        handles = [await engine.submit(prompt="hello", params=tokens(2)) for _ in range(5)]
        with anyio.fail_after(5), pytest.raises(EngineOverloaded) as caught:
            await engine.submit(prompt="one more")
        assert caught.value.retry_after > 0
        gate.open()
        for handle in handles:
            assert len([token async for batch in handle for token in batch.tokens]) == 2
        await engine.generate(prompt="one more", params=tokens(1))
        await settle(engine)
