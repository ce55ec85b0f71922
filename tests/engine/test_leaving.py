"""Leaving a generation in any way cancels it in the scheduler."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio
import pytest

from qwen3_asgi.errors import GenerationCancelled
from tests.engine.engines import (
    GUARD_SECONDS,
    LONG,
    Gate,
    executor,
    running,
    settle,
    tokens,
    toy_engine,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from qwen3_asgi.engine.engine import Engine
    from qwen3_asgi.testing import FakeExecutor

pytestmark = pytest.mark.anyio


class Lost(Exception):
    pass


@pytest.fixture
def fake() -> FakeExecutor:
    return executor()


@pytest.fixture
async def engine(fake: FakeExecutor) -> AsyncIterator[Engine]:
    """Not gated: every request here is far too long to end by itself within a test's few steps."""
    async with running(toy_engine(fake)) as engine:
        yield engine


def assert_cancelled(fake: FakeExecutor, *, requests: int = 1) -> None:
    """It left before its end, not because it ran through."""
    assert len(fake.dropped) == requests
    for request_id in fake.dropped:
        assert sum(row.request_id == request_id for row in fake.rows) < 2900


async def test_a_cancelled_generate_is_dropped(engine: Engine, fake: FakeExecutor) -> None:
    async with anyio.create_task_group() as group:
        group.start_soon(lambda: engine.generate(prompt="hello", params=LONG))
        await Gate(fake, open=True).held(2)
        group.cancel_scope.cancel()
    await settle(engine)
    assert_cancelled(fake)


async def test_a_cancellation_before_the_first_token_is_dropped(
    engine: Engine, fake: FakeExecutor
) -> None:
    gate = Gate(fake)
    async with anyio.create_task_group() as group:
        group.start_soon(lambda: engine.generate(prompt="hello", params=LONG))
        await gate.held(1)
        group.cancel_scope.cancel()
    gate.open()
    await settle(engine)
    assert fake.plans == 1
    assert_cancelled(fake)


async def test_a_stream_left_by_return_is_dropped(engine: Engine, fake: FakeExecutor) -> None:
    stream = engine.stream(prompt="hello", params=LONG)

    async def first() -> str:
        async for delta in stream:
            return delta.text
        raise AssertionError("no delta")

    await first()
    await stream.aclose()
    await settle(engine)
    assert_cancelled(fake)


async def test_a_stream_left_by_an_exception_is_dropped(engine: Engine, fake: FakeExecutor) -> None:
    async def lose_it() -> None:
        async for _ in engine.stream(prompt="hello", params=LONG):
            raise Lost

    with pytest.raises(Lost):
        await lose_it()
    await settle(engine)
    assert_cancelled(fake)


async def test_a_cancelled_stream_is_dropped(engine: Engine, fake: FakeExecutor) -> None:
    with anyio.CancelScope() as scope:
        async for _ in engine.stream(prompt="hello", params=LONG):
            scope.cancel()
    assert scope.cancelled_caught
    await settle(engine)
    assert_cancelled(fake)


async def test_a_stream_that_is_garbage_is_dropped(engine: Engine, fake: FakeExecutor) -> None:
    stream = engine.stream(prompt="hello", params=LONG)
    await anext(stream)
    del stream
    await settle(engine)
    assert_cancelled(fake)


async def test_breaking_out_of_a_stream_drops_it_at_once(
    engine: Engine, fake: FakeExecutor
) -> None:
    async for _ in engine.stream(prompt="hello", params=LONG):
        break
    await settle(engine)
    assert_cancelled(fake)


async def test_a_stream_that_ended_stays_ended(engine: Engine) -> None:
    stream = engine.stream(prompt="hello", params=tokens(3))
    assert [delta async for delta in stream][-1].finish_reason == "length"
    assert [delta async for delta in stream] == []


async def test_a_stream_that_was_never_read_submits_nothing(engine: Engine) -> None:
    stream = engine.stream(prompt="hello", params=LONG)
    await stream.aclose()
    assert engine.state == "new"


async def test_a_dropped_handle_is_dropped_in_the_scheduler(
    engine: Engine, fake: FakeExecutor
) -> None:
    handle = await engine.submit(prompt="hello", params=LONG)
    await Gate(fake, open=True).held(2)
    del handle
    await settle(engine)
    assert_cancelled(fake)


async def test_ten_dropped_handles_are_gone_within_two_iterations(fake: FakeExecutor) -> None:
    gate = Gate(fake)
    async with running(toy_engine(fake), gate) as engine:
        handles = [await engine.submit(prompt=f"hello {i}", params=LONG) for i in range(10)]
        gate.allow(3)
        await gate.held(4)
        before = engine.load()
        assert before.num_running == 10
        handles.clear()
        gate.allow(1)  # the step that was running; nothing may follow
        await settle(engine)
        after = engine.load()
        assert (after.num_running, after.num_waiting, after.kv_used_blocks) == (0, 0, 0)
        assert after.iteration - before.iteration <= 2
        assert after.step == before.step
        assert fake.plans == 4
        gate.open()
        with anyio.fail_after(GUARD_SECONDS):
            follow_up = await engine.generate(prompt="hello", params=tokens(5))
        assert len(follow_up.token_ids) == 5


async def test_waiting_requests_that_are_dropped_never_run(fake: FakeExecutor) -> None:
    gate = Gate(fake)
    async with running(toy_engine(fake), gate) as engine:
        running_one = await engine.submit(prompt="hello", params=tokens(3))
        await gate.held(1)
        waiting = [await engine.submit(prompt="waiting", params=LONG) for _ in range(20)]
        ids = {handle.request_id for handle in waiting}
        del waiting
        gate.open()
        assert [t async for batch in running_one for t in batch.tokens]
        await settle(engine)
        assert not ids & {row.request_id for row in fake.rows}


async def test_a_generation_that_ended_is_not_cancelled(engine: Engine, fake: FakeExecutor) -> None:
    handle = await engine.submit(prompt="hello", params=tokens(3))
    batches = [batch async for batch in handle]
    handle.cancel()
    assert batches[-1].finish is not None
    assert batches[-1].finish.reason == "length"
    assert [batch async for batch in handle] == []

    other = await engine.submit(prompt="hello", params=LONG)
    other.cancel()
    with anyio.fail_after(GUARD_SECONDS), pytest.raises(GenerationCancelled):
        [batch async for batch in other]
