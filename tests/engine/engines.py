"""Real engines (thread, scheduler, bridge) on a fake executor, and a gate that holds their steps.

Tests wait for what a scheduler has done by the gate and by counts, never by time.
"""

from __future__ import annotations

import threading
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel
import anyio.to_thread

from qwen3_asgi.config import EngineConfig, SamplingParams
from qwen3_asgi.testing import FakeExecutor, assert_idle, fake_engine
from qwen3_asgi.testing.fake_executor import generate
from tests.text.toy import toy_tokenizer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from qwen3_asgi.engine.engine import Engine
    from qwen3_asgi.scheduler.plan import StepPlan

GUARD_SECONDS = 20.0
VOCAB = 256
LONG = SamplingParams(max_tokens=3000, ignore_eos=True)


def tokens(count: int) -> SamplingParams:
    return SamplingParams(max_tokens=count, ignore_eos=True)


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
    await anyio.to_thread.run_sync(assert_idle, engine)


class Gate:
    """Holds an executor's steps. A step `arrives`, then waits until it is allowed."""

    def __init__(self, fake: FakeExecutor, *, open: bool = False) -> None:
        self._condition = threading.Condition()
        self._allowed: int | None = None if open else 0
        self.arrived = 0
        self.plan: StepPlan | None = None
        fake.before_step = self._step

    def hold(self) -> None:
        """From the next step on."""
        self._change(lambda allowed: 0)

    def allow(self, steps: int) -> None:
        self._change(lambda allowed: (allowed or 0) + steps)

    def open(self) -> None:
        self._change(lambda allowed: None)

    async def held(self, arrived: int) -> None:
        """Return when the scheduler stands in its `arrived`-th step (counted from 1)."""
        await anyio.to_thread.run_sync(self.held_sync, arrived)

    def held_sync(self, arrived: int) -> None:
        with self._condition:
            if not self._condition.wait_for(lambda: self.arrived >= arrived, GUARD_SECONDS):
                raise AssertionError(f"step {arrived} never came, only {self.arrived}")

    def _change(self, change: Callable[[int | None], int | None]) -> None:
        with self._condition:
            self._allowed = change(self._allowed)
            self._condition.notify_all()

    def _step(self, plan: StepPlan) -> None:
        with self._condition:
            self.arrived += 1
            self.plan = plan
            self._condition.notify_all()
            self._condition.wait_for(lambda: self._allowed != 0, GUARD_SECONDS)
            if self._allowed is not None:
                self._allowed -= 1
