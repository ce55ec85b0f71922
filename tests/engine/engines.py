"""Real engines (thread, scheduler, bridge) on a fake executor, and a gate that holds their steps.

Tests wait for what a scheduler has done by the gate and by counts, never by time.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel

from qwen3_asgi.config import EngineConfig, SamplingParams
from qwen3_asgi.testing import FakeExecutor, StepGate, assert_idle_async, fake_engine
from qwen3_asgi.testing.fake_executor import generate
from tests.text.toy import toy_tokenizer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from qwen3_asgi.engine.engine import Engine

GUARD_SECONDS = 20.0
VOCAB = 256
LONG = SamplingParams(max_tokens=3000, ignore_eos=True)


def tokens(count: int) -> SamplingParams:
    return SamplingParams(max_tokens=count, ignore_eos=True)


async def until(condition: Callable[[], bool]) -> None:
    with anyio.fail_after(GUARD_SECONDS):
        while not condition():
            await anyio.lowlevel.checkpoint()


def executor(*, num_kv_blocks: int = 4096, max_context_tokens: int = 4096) -> FakeExecutor:
    return FakeExecutor(
        num_kv_blocks=num_kv_blocks,
        block_size=16,
        max_context_tokens=max_context_tokens,
        vocab_size=VOCAB,
    )


def toy_engine(fake: FakeExecutor | None = None, config: EngineConfig | None = None) -> Engine:
    return fake_engine(fake or executor(), config, tokenizer=toy_tokenizer(), eos_token_ids=())


def expected(prompt: Sequence[int], count: int) -> list[int]:
    """What the fake model answers, whoever else is served."""
    return generate(prompt, count, VOCAB)


@asynccontextmanager
async def running(engine: Engine, gate: Gate | None = None) -> AsyncIterator[Engine]:
    """Stop the engine at the end, whatever the test did; a gate is opened first."""
    try:
        yield engine
    finally:
        if gate is not None:
            gate.open()
        with anyio.CancelScope(shield=True):
            await engine.stop(drain=0)


async def quiet(turns: int = 12) -> None:
    """Let every other task of this loop run until it waits: a few turns of the loop."""
    for _ in range(turns):
        await anyio.lowlevel.checkpoint()


async def settle(engine: Engine) -> None:
    """`assert_idle` without blocking the event loop."""
    await assert_idle_async(engine)


class Gate(StepGate):
    """In front of one executor; closed unless told otherwise."""

    def __init__(self, fake: FakeExecutor, *, open: bool = False) -> None:
        super().__init__(open=open, guard_seconds=GUARD_SECONDS)
        fake.gate = self
