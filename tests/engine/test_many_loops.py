"""One engine under four event loops at once, each in a thread of its own: two of asyncio's, one of
uvloop's, one of trio's. What happens in one of them is nobody else's business."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest
from prometheus_client import CollectorRegistry

from qwen3_asgi.config import EngineConfig
from qwen3_asgi.errors import GenerationCancelled
from qwen3_asgi.testing import assert_idle
from tests.engine.engines import GUARD_SECONDS, LONG, Gate, executor, expected, tokens, toy_engine

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator
    from concurrent.futures import Future

    from qwen3_asgi.engine.engine import Engine
    from qwen3_asgi.engine.handle import RequestHandle

ASYNCIO: dict[str, Any] = {"backend": "asyncio"}
UVLOOP: dict[str, Any] = {"backend": "asyncio", "backend_options": {"use_uvloop": True}}
TRIO: dict[str, Any] = {"backend": "trio"}
LOOPS = [ASYNCIO, UVLOOP, TRIO, ASYNCIO]


class Loops:
    """Runs `work(i)` on the i-th loop; `arrive` and `met` let the test wait for all of them."""

    def __init__(self, loops: list[dict[str, Any]]) -> None:
        self._loops = loops
        self._threads = ThreadPoolExecutor(len(loops))
        self._arrived = threading.Semaphore(0)

    def run(self, work: Callable[[int], Awaitable[None]]) -> list[Future[None]]:
        async def guarded(i: int) -> None:
            with anyio.fail_after(GUARD_SECONDS):
                await work(i)

        return [
            self._threads.submit(partial(anyio.run, guarded, i, **loop))
            for i, loop in enumerate(self._loops)
        ]

    def arrive(self) -> None:
        self._arrived.release()

    def met(self, count: int) -> None:
        """Wait for so many to arrive."""
        for _ in range(count):
            if not self._arrived.acquire(timeout=GUARD_SECONDS):
                raise AssertionError("a loop never came so far")

    def close(self) -> None:
        self._threads.shutdown()


@contextmanager
def loops(engine: Engine, gate: Gate, kinds: list[dict[str, Any]] = LOOPS) -> Iterator[Loops]:
    """The gate is opened and the engine stopped at the end, whatever the test did."""
    running = Loops(kinds)
    try:
        yield running
    finally:
        gate.open()
        engine.stop_sync(drain=0)
        running.close()


def prompt(*which: int) -> list[int]:
    return [1 + number for number in which]


async def read(handle: RequestHandle, seen: list[int], after: Callable[[], None]) -> None:
    async for batch in handle:
        for token in batch.tokens:
            seen.append(token.token_id)
            after()


def wake_ups(registry: CollectorRegistry) -> float:
    name = "qwen3_asgi_event_loop_wakeups_total"
    samples = [sample for family in registry.collect() for sample in family.samples]
    return sum(sample.value for sample in samples if sample.name == name)


def test_each_loop_is_woken_once_per_step_however_many_of_its_streams_have_news() -> None:
    """A step is let go when every reader has the token of the one before: no reader is behind."""
    streams, steps = 5, 12
    fake = executor()
    gate = Gate(fake)
    engine = toy_engine(fake, EngineConfig(max_batch=64))
    registry = CollectorRegistry()
    engine.metrics(registry)
    seen: dict[tuple[int, int], list[int]] = {}

    with loops(engine, gate) as running:
        blocker = engine.submit_sync(prompt_token_ids=[99], params=tokens(1))
        gate.held_sync(1)  # what is submitted now comes into the second step together

        async def work(i: int) -> None:
            async with anyio.create_task_group() as group:
                for j in range(streams):
                    handle = await engine.submit(
                        prompt_token_ids=prompt(i, j), params=tokens(steps)
                    )
                    seen[i, j] = []
                    group.start_soon(read, handle, seen[i, j], running.arrive)
                running.arrive()

        ended = running.run(work)
        running.met(len(LOOPS))
        gate.allow(1)
        for step in range(steps):
            gate.held_sync(2 + step)
            assert wake_ups(registry) == len(LOOPS) * step
            gate.allow(1)
            running.met(len(LOOPS) * streams)
        for future in ended:
            future.result(GUARD_SECONDS)
        assert_idle(engine)
        assert wake_ups(registry) == len(LOOPS) * steps
        assert fake.plans == 1 + steps
        assert len(next(blocker.read_sync()).tokens) == 1
    assert seen == {
        (i, j): expected(prompt(i, j), steps) for i in range(len(LOOPS)) for j in range(streams)
    }


def test_what_is_cancelled_in_one_loop_disturbs_no_stream_anywhere() -> None:
    """In each loop one task is cancelled that reads, and one handle from another thread."""
    fake = executor()
    gate = Gate(fake)
    engine = toy_engine(fake, EngineConfig(max_batch=64))
    victims: list[RequestHandle] = []
    seen: dict[tuple[int, int], list[int]] = {}
    told: list[str] = []
    cancel_now = threading.Event()

    with loops(engine, gate) as running:

        async def doomed(handle: RequestHandle) -> None:
            try:
                await read(handle, [], lambda: None)
            except GenerationCancelled:
                told.append("cancelled by its handle")

        async def work(i: int) -> None:
            async with anyio.create_task_group() as group:
                for j in range(3):
                    handle = await engine.submit(prompt_token_ids=prompt(i, j), params=tokens(60))
                    seen[i, j] = []
                    group.start_soon(read, handle, seen[i, j], lambda: None)
                task, by_hand = [
                    await engine.submit(prompt_token_ids=prompt(i, j), params=LONG) for j in (7, 8)
                ]
                victims.extend([task, by_hand])
                group.start_soon(doomed, by_hand)
                with anyio.CancelScope() as scope:
                    group.start_soon(cancel_when, cancel_now, scope)
                    running.arrive()
                    await read(task, [], lambda: None)
                assert scope.cancelled_caught
                task.cancel()
                running.arrive()

        ended = running.run(work)
        running.met(len(LOOPS))
        gate.allow(20)
        gate.held_sync(21)
        held = step_at(gate)
        cancel_now.set()
        for handle in victims[1::2]:
            handle.cancel()
        running.met(len(LOOPS))
        gate.open()
        for future in ended:
            future.result(GUARD_SECONDS)
        assert_idle(engine)
    assert told == ["cancelled by its handle"] * len(LOOPS)
    assert len(victims) == 2 * len(LOOPS)
    for handle in victims:
        assert fake.rows_of(handle.request_id)[-1].step == held, "in the held step, and no other"
    assert seen == {(i, j): expected(prompt(i, j), 60) for i in range(len(LOOPS)) for j in range(3)}


def step_at(gate: Gate) -> int:
    """The number of the step that is held."""
    assert gate.plan is not None
    return gate.plan.step


async def cancel_when(asked: threading.Event, scope: anyio.CancelScope) -> None:
    await anyio.to_thread.run_sync(asked.wait, GUARD_SECONDS)
    scope.cancel()


@pytest.mark.parametrize("closing", [ASYNCIO, UVLOOP, TRIO], ids=["asyncio", "uvloop", "trio"])
def test_a_loop_that_closes_with_live_requests_disturbs_no_other(closing: dict[str, Any]) -> None:
    """Its handles live on outside of it, so that nothing but its end cancels them."""
    fake = executor()
    gate = Gate(fake)
    engine = toy_engine(fake, EngineConfig(max_batch=64))
    orphans: list[RequestHandle] = []
    seen: dict[int, list[int]] = {}

    with loops(engine, gate, [closing, *LOOPS]) as running:

        async def work(i: int) -> None:
            if i == 0:
                orphans.extend(
                    [await engine.submit(prompt_token_ids=prompt(9), params=LONG) for _ in range(3)]
                )
                running.arrive()
                await gate.held(5)
                return
            handle = await engine.submit(prompt_token_ids=prompt(i), params=tokens(60))
            seen[i] = []
            running.arrive()
            await read(handle, seen[i], lambda: None)

        closed, *others = running.run(work)
        running.met(1 + len(LOOPS))
        gate.allow(4)
        closed.result(GUARD_SECONDS)
        gate.held_sync(5)
        held = step_at(gate)
        gate.open()
        for future in others:
            future.result(GUARD_SECONDS)
        assert_idle(engine)
    for handle in orphans:
        # Delivering what the held step made is how the scheduler finds out.
        assert fake.rows_of(handle.request_id)[-1].step == held
    assert seen == {i + 1: expected(prompt(i + 1), 60) for i in range(len(LOOPS))}
