"""Starting, stopping, dying and starting again."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread
import pytest
from starlette.applications import Starlette

from qwen3_asgi.engine.engine import Engine
from qwen3_asgi.errors import (
    EngineDead,
    EngineNotReady,
    GenerationCancelled,
    GenerationFailed,
    ModelLoadError,
)
from qwen3_asgi.scheduler.load import LoadSnapshot
from tests.engine.engines import (
    GUARD_SECONDS,
    LONG,
    Gate,
    executor,
    expected,
    quiet,
    running,
    settle,
    tokens,
    toy_engine,
)
from tests.engine.loader import Loader
from tests.text.toy import toy_tokenizer

if TYPE_CHECKING:
    from qwen3_asgi.engine.handle import RequestHandle
    from qwen3_asgi.scheduler.plan import StepPlan

pytestmark = pytest.mark.anyio


async def read(handle: RequestHandle) -> list[int]:
    return [token.token_id async for batch in handle for token in batch.tokens]


def test_construction_loads_and_starts_nothing() -> None:
    loader = Loader()
    threads = threading.active_count()
    engine = Engine("toy", loader=loader)
    assert (engine.state, loader.calls, threading.active_count()) == ("new", 0, threads)
    assert engine.load() == LoadSnapshot()
    with pytest.raises(EngineNotReady):
        _ = engine.tokenizer


async def test_starting_twice_loads_once() -> None:
    loader = Loader()
    async with running(Engine("toy", loader=loader)) as engine:
        await engine.start()
        await engine.start()
        await anyio.to_thread.run_sync(engine.start_sync)
        assert (loader.calls, engine.state) == (1, "ready")
        assert engine.tokenizer is toy_tokenizer()


async def test_concurrent_first_use_starts_once() -> None:
    loader = Loader()
    outputs = []
    async with running(Engine("toy", loader=loader)) as engine:

        async def use() -> None:
            outputs.append(await engine.generate(prompt="hello", params=tokens(3)))

        def use_in_thread() -> None:
            outputs.append(engine.generate_sync(prompt="hello", params=tokens(3)))

        with anyio.fail_after(GUARD_SECONDS):
            async with anyio.create_task_group() as group:
                for _ in range(8):
                    group.start_soon(use)
                    group.start_soon(anyio.to_thread.run_sync, use_in_thread)
        assert loader.calls == 1
        assert len({output.token_ids for output in outputs}) == 1
        assert len(outputs) == 16


async def test_a_failed_load_reaches_every_waiter_and_can_be_retried() -> None:
    waiting = threading.Event()

    def fail() -> None:
        waiting.wait(GUARD_SECONDS)
        raise ModelLoadError("no such file")

    loader = Loader(fail)
    errors = []
    async with running(Engine("toy", loader=loader)) as engine:

        async def use() -> None:
            with pytest.raises(ModelLoadError, match="no such file") as caught:
                await engine.generate(prompt="hello")
            errors.append(caught.value)

        async with anyio.create_task_group() as group:
            for _ in range(5):
                group.start_soon(use)
            await quiet()
            waiting.set()
        assert (len(errors), loader.calls, engine.state) == (5, 1, "new")
        assert engine.load() == LoadSnapshot()
        loader.before = None
        await engine.generate(prompt="hello", params=tokens(1))
        assert (loader.calls, engine.state) == (2, "ready")


async def test_stop_drains_what_is_live() -> None:
    fake = executor()
    gate = Gate(fake)
    async with running(toy_engine(fake), gate) as engine:
        handle = await engine.submit(prompt_token_ids=[1, 2, 3], params=tokens(20))
        await gate.held(1)
        with anyio.fail_after(GUARD_SECONDS):
            async with anyio.create_task_group() as group:
                group.start_soon(engine.stop)
                await quiet()
                assert engine.state == "draining"
                with pytest.raises(EngineNotReady):
                    await engine.submit(prompt="late")
                with pytest.raises(EngineNotReady):
                    await engine.start()
                gate.open()
                assert await read(handle) == expected([1, 2, 3], 20)
        assert engine.state == "stopped"
        assert fake.closed


async def test_stop_aborts_what_has_not_finished_in_time() -> None:
    fake = executor()
    gate = Gate(fake)
    async with running(toy_engine(fake), gate) as engine:
        handles = [await engine.submit(prompt="hello", params=LONG) for _ in range(3)]
        await gate.held(1)
        with anyio.fail_after(GUARD_SECONDS):
            async with anyio.create_task_group() as group:
                group.start_soon(lambda: engine.stop(drain=0))
                await quiet()
                gate.open()
        for handle in handles:
            with pytest.raises(GenerationCancelled):
                await read(handle)
        assert engine.load() == LoadSnapshot()


async def test_a_stopped_engine_refuses_until_it_is_started_again() -> None:
    loader = Loader()
    async with running(Engine("toy", loader=loader)) as engine:
        first = await engine.generate(prompt="hello", params=tokens(4))
        await engine.stop()
        await engine.stop()
        assert (engine.state, engine.load()) == ("stopped", LoadSnapshot())
        with pytest.raises(EngineNotReady):
            await engine.generate(prompt="hello")
        await engine.start()
        again = await engine.generate(prompt="hello", params=tokens(4))
        assert again.token_ids == first.token_ids
        assert loader.calls == 2


async def test_stopping_a_new_engine_changes_nothing() -> None:
    async with running(toy_engine()) as engine:
        await engine.stop()
        engine.stop_sync()
        assert engine.state == "new"
        await engine.generate(prompt="hello", params=tokens(1))


async def test_an_engine_stopped_while_it_loads_never_becomes_ready() -> None:
    loading = threading.Event()
    loader = Loader(lambda: _wait(loading))
    engine = Engine("toy", loader=loader)
    async with running(engine):
        with anyio.fail_after(GUARD_SECONDS):
            async with anyio.create_task_group() as group:
                group.start_soon(_refused, engine)
                await quiet()
                group.start_soon(engine.stop)
                await quiet()
                assert engine.state == "draining"
                loading.set()
        assert engine.state == "stopped"
        assert loader.loaded[0].executor.closed  # type: ignore[attr-defined]


async def test_a_stop_that_is_cancelled_while_the_model_loads_still_stops_it() -> None:
    loading = threading.Event()
    async with running(Engine("toy", loader=Loader(lambda: _wait(loading)))) as engine:
        async with anyio.create_task_group() as group:
            group.start_soon(_refused, engine)
            await quiet()
            with anyio.move_on_after(0):
                await engine.stop()
            loading.set()
        with anyio.fail_after(GUARD_SECONDS):
            await engine.stop()
        assert engine.state == "stopped"


async def test_a_load_that_fails_ends_the_stop_that_waits_for_it() -> None:
    loading = threading.Event()

    def fail() -> None:
        _wait(loading)
        raise ModelLoadError("broken")

    async with running(Engine("toy", loader=Loader(fail))) as engine:

        async def start() -> None:
            with pytest.raises(ModelLoadError):
                await engine.start()

        with anyio.fail_after(GUARD_SECONDS):
            async with anyio.create_task_group() as group:
                group.start_soon(start)
                await quiet()
                group.start_soon(engine.stop)
                await quiet()
                loading.set()
        assert engine.state == "stopped"


async def test_two_stops_at_once_both_return() -> None:
    fake = executor()
    gate = Gate(fake)
    async with running(toy_engine(fake), gate) as engine:
        handle = await engine.submit(prompt="hello", params=tokens(5))
        await gate.held(1)
        with anyio.fail_after(GUARD_SECONDS):
            async with anyio.create_task_group() as group:
                for _ in range(3):
                    group.start_soon(lambda: engine.stop(drain=1000))
                await quiet()
                gate.open()
        assert len(await read(handle)) == 5


async def test_a_dead_engine_ends_every_request_with_engine_dead() -> None:
    fake = executor()
    gate = Gate(fake)
    async with running(toy_engine(fake), gate) as engine:
        handles = [await engine.submit(prompt="hello", params=LONG) for _ in range(3)]
        waiting = [await engine.submit(prompt="x" * 600, params=LONG) for _ in range(3)]
        await gate.held(1)
        scheduler = _thread_of(engine)

        def die(plan: StepPlan) -> None:
            raise SystemExit("the device is gone")

        fake.before_step = die
        gate.open()
        for handle in handles + waiting:
            with pytest.raises(EngineDead):
                await read(handle)
            with pytest.raises(EngineDead):  # and again: it does not hang
                await read(handle)
        await anyio.to_thread.run_sync(scheduler.join, GUARD_SECONDS)
        assert engine.state == "dead"
        assert engine.load() == LoadSnapshot()
        with pytest.raises(EngineDead):
            await engine.generate(prompt="hello")
        fake.before_step = None
        await engine.start()
        await engine.generate(prompt="hello", params=tokens(2))


async def test_a_failed_step_fails_its_requests_and_the_engine_goes_on() -> None:
    fake = executor()

    def fail(plan: StepPlan) -> None:
        fake.before_step = None
        raise RuntimeError("out of memory")

    fake.before_step = fail
    async with running(toy_engine(fake)) as engine:
        with pytest.raises(GenerationFailed, match="out of memory"):
            await engine.generate(prompt="hello", params=tokens(2))
        assert len((await engine.generate(prompt="hello", params=tokens(2))).token_ids) == 2
        await settle(engine)


async def test_the_lifespan_starts_and_stops_the_engine() -> None:
    engine = toy_engine()
    app = Starlette(lifespan=engine.lifespan)
    states = []
    async with app.router.lifespan_context(app):
        states.append(engine.state)
    states.append(engine.state)
    assert states == ["ready", "stopped"]


async def test_context_managers_start_and_stop_the_engine() -> None:
    engine = toy_engine()
    states = []
    async with engine as same:
        assert same is engine
        states.append(engine.state)
    states.append(engine.state)
    assert states == ["ready", "stopped"]

    def in_thread() -> None:
        with engine as same:
            assert same is engine
            assert len(same.generate_sync(prompt="hello", params=tokens(2)).token_ids) == 2

    await anyio.to_thread.run_sync(in_thread)
    assert engine.state == "stopped"


async def test_leaving_the_context_manager_by_cancellation_stops_the_engine() -> None:
    engine = toy_engine()
    with anyio.CancelScope() as scope:
        async with engine:
            scope.cancel()
            await anyio.sleep_forever()
    assert engine.state == "stopped"


async def test_a_stopped_engine_keeps_nothing_of_its_model() -> None:
    loader = Loader()
    async with running(Engine("toy", loader=loader)) as engine:
        await engine.generate(prompt="hello", params=tokens(1))
        await engine.stop()
        assert engine._lifecycle._started is None
        assert engine._lifecycle.runtime is None


def _wait(event: threading.Event) -> None:
    event.wait(GUARD_SECONDS)


async def _refused(engine: Engine) -> None:
    with pytest.raises(EngineNotReady):
        await engine.generate(prompt="hello")


def _thread_of(engine: Engine) -> threading.Thread:
    name = f"qwen3-asgi {engine.model_name}"
    return next(thread for thread in threading.enumerate() if thread.name == name)
