"""Several apps, blocks and threads inside one engine: the first starts it, the last stops it."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest
from starlette.applications import Starlette

from qwen3_asgi.engine.engine import Engine
from qwen3_asgi.errors import EngineNotReady, ModelLoadError
from tests.engine.engines import (
    GUARD_SECONDS,
    Gate,
    executor,
    expected,
    quiet,
    running,
    tokens,
    toy_engine,
)
from tests.engine.loader import Door, Loader

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from qwen3_asgi.engine.handle import RequestHandle

pytestmark = pytest.mark.anyio


async def test_of_two_apps_the_last_one_out_stops_the_engine() -> None:
    loader = Loader()
    engine = Engine("toy", loader=loader)
    one, other = (Starlette(lifespan=engine.lifespan) for _ in range(2))
    first, second = AsyncExitStack(), AsyncExitStack()
    await first.enter_async_context(one.router.lifespan_context(one))
    await second.enter_async_context(other.router.lifespan_context(other))
    await first.aclose()  # in the order of entry, not nested
    assert engine.state == "ready"
    assert len((await engine.generate(prompt="hello", params=tokens(3))).token_ids) == 3
    await second.aclose()
    assert (engine.state, loader.calls) == ("stopped", 1)


async def test_nested_blocks_of_both_kinds_are_one_run() -> None:
    loader = Loader()
    states = []
    async with Engine("toy", loader=loader) as engine:
        async with engine:
            states.append(engine.state)
        states.append(engine.state)
        await anyio.to_thread.run_sync(_in_and_out, engine)
        states.append(engine.state)
    states.append(engine.state)
    assert states == ["ready", "ready", "ready", "stopped"]
    assert loader.calls == 1


async def test_it_composes_with_the_lifespan_and_the_state_of_the_host() -> None:
    engine = toy_engine()
    order = []

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[dict[str, Any]]:
        async with AsyncExitStack() as stack:
            stack.callback(lambda: order.append(f"database closed, engine {engine.state}"))
            await stack.enter_async_context(engine.lifespan(app))
            order.append(f"open, engine {engine.state}")
            yield {"database": "open", "engine": engine}

    app = Starlette(lifespan=lifespan)
    async with app.router.lifespan_context(app) as state:
        assert state == {"database": "open", "engine": engine}
    assert order == ["open, engine ready", "database closed, engine stopped"]


async def test_an_explicit_stop_stops_at_once_and_later_exits_are_harmless() -> None:
    engine = toy_engine()
    async with engine:
        async with engine:
            await engine.stop()
            assert engine.state == "stopped"
            with pytest.raises(EngineNotReady):
                await engine.generate(prompt="hello")
        assert engine.state == "stopped"
    assert engine.state == "stopped"


async def test_who_is_still_inside_after_a_stop_and_a_start_keeps_it_running() -> None:
    engine = toy_engine()
    async with engine:
        async with engine:
            await engine.stop()
            await engine.start()
        assert engine.state == "ready"
    assert engine.state == "stopped"


async def test_many_threads_and_loops_going_in_and_out_never_find_it_stopped() -> None:
    loader = Loader()
    engine = Engine("toy", loader=loader)
    num_threads, rounds = 8, 12

    async def on_a_loop() -> None:
        for _ in range(rounds):
            async with engine:
                assert len((await engine.generate(prompt="x", params=tokens(2))).token_ids) == 2

    def in_a_thread(number: int) -> None:
        if number % 2:
            anyio.run(on_a_loop, backend="asyncio" if number % 4 == 1 else "trio")
            return
        for _ in range(rounds):
            _in_and_out(engine)

    with ThreadPoolExecutor(num_threads) as pool:
        done = [pool.submit(in_a_thread, number) for number in range(num_threads)]
        with anyio.fail_after(GUARD_SECONDS * 2):
            await on_a_loop()
            for future in done:
                await anyio.to_thread.run_sync(future.result)
    assert engine.state == "stopped"
    assert all(model.executor.closed for model in loader.loaded)  # type: ignore[attr-defined]


async def test_who_enters_while_the_last_one_leaves_waits_and_starts_anew() -> None:
    fake = executor()
    gate = Gate(fake)
    engine = toy_engine(fake)
    async with running(engine, gate):
        entered, leave = anyio.Event(), anyio.Event()
        handle: RequestHandle | None = None

        async def first() -> None:
            nonlocal handle
            async with engine:
                handle = await engine.submit(prompt_token_ids=[1, 2, 3], params=tokens(4))
                await gate.held(1)
            # The drain has let the live request finish.
            assert [t.token_id async for batch in handle for t in batch.tokens] == expected(
                [1, 2, 3], 4
            )

        async def second() -> None:
            async with engine:
                entered.set()
                await leave.wait()

        with anyio.fail_after(GUARD_SECONDS):
            async with anyio.create_task_group() as group:
                group.start_soon(first)
                while engine.state != "draining":
                    await anyio.lowlevel.checkpoint()
                group.start_soon(second)
                await quiet()
                assert not entered.is_set()
                gate.open()
                await entered.wait()
                assert engine.state == "ready"
                leave.set()
        assert engine.state == "stopped"


async def test_an_entry_that_is_cancelled_while_it_waits_for_the_model_counts_no_more() -> None:
    door = Door()
    engine = Engine("toy", loader=Loader(door.wait))
    async with running(engine):
        with anyio.CancelScope() as scope:
            scope.cancel()
            async with engine:
                raise AssertionError("entered")
        assert engine.state == "draining"  # nobody wants it any more
        door.open()
        with anyio.fail_after(GUARD_SECONDS):
            async with engine:
                assert engine.state == "ready"
            assert engine.state == "stopped"


async def test_a_cancelled_entry_does_not_stop_who_is_inside() -> None:
    door = Door()
    engine = Engine("toy", loader=Loader(door.wait))
    async with running(engine):

        async def stay(entered: anyio.Event, leave: anyio.Event) -> None:
            async with engine:
                entered.set()
                await leave.wait()

        entered, leave = anyio.Event(), anyio.Event()
        with anyio.fail_after(GUARD_SECONDS):
            async with anyio.create_task_group() as group:
                group.start_soon(stay, entered, leave)
                await quiet()
                with anyio.CancelScope() as scope:
                    scope.cancel()
                    async with engine:
                        raise AssertionError("entered")
                door.open()
                await entered.wait()
                assert engine.state == "ready"
                leave.set()
        assert engine.state == "stopped"


async def test_an_entry_whose_model_cannot_be_loaded_counts_no_more() -> None:
    def fail() -> None:
        raise ModelLoadError("no such file")

    loader = Loader(fail)
    engine = Engine("toy", loader=loader)
    for _ in range(2):
        with pytest.raises(ModelLoadError):
            await engine.__aenter__()
    with pytest.raises(ModelLoadError):
        await anyio.to_thread.run_sync(engine.__enter__)
    loader.before = None
    async with engine:
        assert engine.state == "ready"
    assert engine.state == "stopped"


@pytest.mark.parametrize("from_thread", [False, True])
async def test_a_stop_from_another_loop_ends_the_requests_of_this_one(
    from_thread: bool, anyio_backend_name: str
) -> None:
    fake = executor()
    gate = Gate(fake)
    other = "trio" if anyio_backend_name == "asyncio" else "asyncio"
    async with running(toy_engine(fake), gate) as engine:
        handle = await engine.submit(prompt_token_ids=[5, 6], params=tokens(9))
        await gate.held(1)

        def stop() -> None:
            if from_thread:
                engine.stop_sync(drain=GUARD_SECONDS)
            else:
                anyio.run(lambda: engine.stop(drain=GUARD_SECONDS), backend=other)

        with anyio.fail_after(GUARD_SECONDS):
            async with anyio.create_task_group() as group:
                group.start_soon(anyio.to_thread.run_sync, stop)
                while engine.state != "draining":
                    await anyio.lowlevel.checkpoint()
                gate.open()
                read = [token.token_id async for batch in handle for token in batch.tokens]
        assert read == expected([5, 6], 9)  # it was given the time to finish
        assert engine.state == "stopped"


async def test_a_second_stop_without_patience_cuts_the_first_short() -> None:
    fake = executor()
    gate = Gate(fake)
    async with running(toy_engine(fake), gate) as engine:
        handle = await engine.submit(prompt="hello", params=tokens(3000))
        await gate.held(1)
        with anyio.fail_after(GUARD_SECONDS):
            async with anyio.create_task_group() as group:
                group.start_soon(lambda: engine.stop(drain=10 * GUARD_SECONDS))
                await quiet()
                group.start_soon(anyio.to_thread.run_sync, lambda: engine.stop_sync(drain=0))
                await _stop_was_asked(engine)
                gate.allow(1)
        assert gate.arrived < 3000
        assert engine.state == "stopped"
        del handle


async def _stop_was_asked(engine: Engine) -> None:
    inbox = engine._running().scheduler._inbox
    while inbox._commands.empty():
        await anyio.lowlevel.checkpoint()


def _in_and_out(engine: Engine) -> None:
    with engine:
        assert len(engine.generate_sync(prompt="x", params=tokens(2)).token_ids) == 2


def test_threads_that_enter_together_load_once() -> None:
    loader, num_threads = Loader(), 16
    engine = Engine("toy", loader=loader)
    barrier = threading.Barrier(num_threads)

    def enter(_: int) -> str:
        with engine:
            state = engine.state
            barrier.wait(GUARD_SECONDS)  # nobody leaves before everybody is in
            return state

    with ThreadPoolExecutor(num_threads) as pool:
        assert set(pool.map(enter, range(num_threads))) == {"ready"}
    assert (engine.state, loader.calls) == ("stopped", 1)
