"""A whole `Engine` over a fake executor: real thread, scheduler and bridge, no torch or weights."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from qwen3_asgi.engine.engine import Engine
from qwen3_asgi.engine.loading import LoadedModel, SamplingDefaults
from qwen3_asgi.testing.fake_executor import FakeExecutor
from qwen3_asgi.text.tokenizer import Tokenizer
from qwen3_asgi.tiny import tiny_path

if TYPE_CHECKING:
    from qwen3_asgi.config import EngineConfig
    from qwen3_asgi.scheduler.executor import ModelExecutor


def fake_engine(
    executor: ModelExecutor | None = None,
    config: EngineConfig | None = None,
    *,
    eos_token_ids: tuple[int, ...] = (0,),
    tokenizer: Tokenizer | None = None,
) -> Engine:
    """An engine named "fake"; its tokens are deterministic nonsense.

    Args:
        executor: a `FakeExecutor` with room for most tests when None.
        config: as for `Engine`.
        eos_token_ids: the tokens that end an output; `FakeExecutor.eos_after` makes it yield 0.
        tokenizer: the bundled one when None.
    """

    def load(name: str, settings: EngineConfig) -> LoadedModel:
        del name, settings
        text = tokenizer or Tokenizer.from_folder(tiny_path())
        model = executor or FakeExecutor(
            num_kv_blocks=1024, block_size=16, vocab_size=len(text.owned_token_ids)
        )
        return LoadedModel(model, text, eos_token_ids, SamplingDefaults(temperature=0.0))

    return Engine("fake", config, loader=load)


def assert_idle(engine: Engine, *, timeout: float = 5.0) -> None:
    """Wait until nothing is live, then check that nothing was left behind.

    Raises:
        AssertionError: requests or KV blocks are still held after `timeout` seconds.
    """
    deadline = time.monotonic() + timeout
    while True:
        load = engine.load()
        if load.idle and load.kv_used_blocks == 0:
            return
        if time.monotonic() > deadline:
            raise AssertionError(f"the engine is not idle after {timeout} s: {load}")
        time.sleep(0.001)
