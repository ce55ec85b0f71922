"""`assert_idle`, its async form and `assert_no_leaks` see what is left, and only that."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import anyio
import pytest

from qwen3_asgi.testing import (
    StepGate,
    assert_idle,
    assert_idle_async,
    assert_no_leaks,
    fake_engine,
)
from tests.engine.engines import LONG, tokens

if TYPE_CHECKING:
    from collections.abc import Iterator

    from qwen3_asgi import Engine


@pytest.fixture
def gate() -> StepGate:
    return StepGate()


@pytest.fixture
def engine(gate: StepGate) -> Iterator[Engine]:
    engine = fake_engine(gate=gate)
    engine.start_sync()
    yield engine
    gate.open()
    engine.stop_sync(drain=0)


def test_a_request_that_the_scheduler_has_not_taken_yet_counts(
    engine: Engine, gate: StepGate
) -> None:
    """While a step is held, nothing is drained: `load()` can't know of the second one."""
    gate.hold()
    first = engine.submit_sync(prompt="hello", params=LONG)
    gate.held_sync()
    seen = engine.load()
    second = engine.submit_sync(prompt="hello", params=LONG)
    assert (engine.load(), engine.live_requests) == (seen, 2)
    for handle in (first, second):
        handle.cancel()
    with pytest.raises(AssertionError, match="2 live requests"):
        assert_idle(engine, timeout=0.01)
    gate.open()
    assert_idle(engine)
    assert engine.live_requests == 0


def test_a_fresh_submit_is_never_mistaken_for_idle(engine: Engine) -> None:
    for _ in range(200):
        handle = engine.submit_sync(prompt="hello", params=tokens(1))
        assert_idle(engine)
        assert [batch.finish is not None for batch in handle.read_sync()][-1]
        # Had it passed before the end, the first batch could have been without it.
        assert handle.finish is not None


@pytest.mark.anyio
async def test_the_async_form_lets_the_loop_go_on(engine: Engine, gate: StepGate) -> None:
    gate.hold()
    handle = await engine.submit(prompt="hello", params=LONG)
    await gate.held()

    async def leave() -> None:
        await anyio.lowlevel.checkpoint()
        handle.cancel()
        gate.open()

    async with anyio.create_task_group() as group:
        group.start_soon(leave)
        await assert_idle_async(engine)
    assert handle.finish is None


@pytest.mark.anyio
async def test_the_sync_form_says_that_it_has_blocked_the_loop(
    engine: Engine, gate: StepGate
) -> None:
    gate.hold()
    handle = await engine.submit(prompt="hello", params=LONG)
    with pytest.raises(AssertionError, match="event loop was blocked"):
        assert_idle(engine, timeout=0.01)
    with pytest.raises(AssertionError, match="1 live requests") as caught:
        await assert_idle_async(engine, timeout=0.01)
    assert "blocked" not in str(caught.value)
    handle.cancel()


def test_a_thread_that_is_left_is_a_leak_and_one_of_a_pool_is_not(engine: Engine) -> None:
    end = threading.Event()
    thread = threading.Thread(target=end.wait, name="forgotten", daemon=True)
    check = assert_no_leaks(engine, timeout=0.01)
    with pytest.raises(AssertionError, match="thread 'forgotten'"), check:
        thread.start()
    with ThreadPoolExecutor() as pool:
        with assert_no_leaks(engine, timeout=0.01):
            pool.submit(int).result()
        assert any(t.name.startswith("ThreadPoolExecutor") for t in threading.enumerate())
    end.set()
    thread.join()


def test_an_engine_that_is_left_running_is_a_leak(gate: StepGate) -> None:
    engine = fake_engine(gate=gate)
    check = assert_no_leaks(timeout=0.01)
    with pytest.raises(AssertionError, match="thread 'qwen3-asgi fake'"), check:
        engine.start_sync()
    engine.stop_sync()


@pytest.mark.anyio
async def test_a_task_that_is_left_is_a_leak() -> None:
    async with anyio.create_task_group() as group:
        with pytest.raises(AssertionError, match="task 'forgotten'"):
            async with assert_no_leaks(timeout=0.01):
                group.start_soon(anyio.sleep_forever, name="forgotten")
        group.cancel_scope.cancel()
    async with assert_no_leaks(), anyio.create_task_group() as group:
        group.start_soon(anyio.lowlevel.checkpoint)


@pytest.mark.anyio
async def test_a_failing_test_fails_with_its_own_error(engine: Engine, gate: StepGate) -> None:
    gate.hold()
    handle = await engine.submit(prompt="hello", params=LONG)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            async with assert_no_leaks(engine, timeout=0.01):
                raise ZeroDivisionError
    handle.cancel()
