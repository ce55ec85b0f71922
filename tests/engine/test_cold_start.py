"""Requests that come while the model is being loaded: they wait, or are refused, or have left."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest

from qwen3_asgi.config import EngineConfig
from qwen3_asgi.engine import lifecycle
from qwen3_asgi.engine.binding import RequestBinding, current_binding
from qwen3_asgi.engine.engine import Engine
from qwen3_asgi.errors import ClientDisconnected, EngineNotReady, ModelLoadError
from tests.engine.engines import GUARD_SECONDS, quiet, running, settle, tokens
from tests.engine.loader import Door, Loader

pytestmark = pytest.mark.anyio

REFUSING = EngineConfig(cold_start="refuse")


async def test_by_default_requests_wait_for_the_start_that_the_first_one_began() -> None:
    door = Door()
    loader = Loader(door.wait)
    lengths = []
    async with running(Engine("toy", loader=loader)) as engine:

        async def use() -> None:
            lengths.append(len((await engine.generate(prompt="hello", params=tokens(3))).token_ids))

        with anyio.fail_after(GUARD_SECONDS):
            async with anyio.create_task_group() as group:
                for _ in range(5):
                    group.start_soon(use)
                await quiet()
                assert (engine.state, lengths) == ("starting", [])
                door.open()
    assert (lengths, loader.calls) == ([3] * 5, 1)


async def test_refusing_lets_only_the_request_wait_that_began_the_start() -> None:
    door = Door()
    loader = Loader(door.wait)
    lengths = []
    async with running(Engine("toy", REFUSING, loader=loader)) as engine:

        async def use() -> None:
            lengths.append(len((await engine.generate(prompt="hello", params=tokens(3))).token_ids))

        with anyio.fail_after(GUARD_SECONDS):
            async with anyio.create_task_group() as group:
                group.start_soon(use)
                await quiet()
                for _ in range(3):
                    with pytest.raises(EngineNotReady, match="is being loaded") as refused:
                        await engine.generate(prompt="hello")
                    assert refused.value.retry_after == 1.0  # it has only just begun
                with pytest.raises(EngineNotReady, match="is being loaded"):
                    await anyio.to_thread.run_sync(lambda: engine.generate_sync(prompt="hello"))
                door.open()
        await use()  # ready: taken like any other
    assert (lengths, loader.calls) == ([3, 3], 1)


async def test_refusing_refuses_all_while_a_lifespan_or_a_probe_starts_it() -> None:
    door = Door()
    async with running(Engine("toy", REFUSING, loader=Loader(door.wait))) as engine:
        engine.start_soon()
        engine.start_soon()  # no request: not refused
        with pytest.raises(EngineNotReady):
            await engine.submit(prompt="hello")
        with anyio.fail_after(GUARD_SECONDS):
            async with anyio.create_task_group() as group:
                group.start_soon(engine.start)  # neither is who asks for the start
                await quiet()
                door.open()
        assert engine.state == "ready"


async def test_who_is_refused_is_told_to_wait_as_long_again_as_it_has_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    door = Door()
    now = 100.0
    monkeypatch.setattr(lifecycle, "time", SimpleNamespace(monotonic=lambda: now))
    async with running(Engine("toy", REFUSING, loader=Loader(door.wait))) as engine:
        engine.start_soon()
        told = []
        for now in (100.2, 107.5, 500.0):  # noqa: B007
            with pytest.raises(EngineNotReady) as refused:
                await engine.submit(prompt="hello")
            told.append(refused.value.retry_after)
        door.open()
    assert told == [1.0, 7.5, 30.0]


async def test_threads_that_come_at_once_begin_one_start_and_the_others_are_refused() -> None:
    door, num_threads = Door(), 16
    loader = Loader(door.wait)
    barrier = threading.Barrier(num_threads)
    ends: list[str] = []
    async with running(Engine("toy", REFUSING, loader=loader)) as engine:

        def use() -> None:
            barrier.wait(GUARD_SECONDS)
            try:
                engine.generate_sync(prompt="hello", params=tokens(2))
                ends.append("served")
            except EngineNotReady:
                ends.append("refused")

        threads = [threading.Thread(target=use) for _ in range(num_threads)]
        for thread in threads:
            thread.start()
        with anyio.fail_after(GUARD_SECONDS):
            while len(ends) < num_threads - 1:
                await anyio.lowlevel.checkpoint()
            door.open()
            for thread in threads:
                await anyio.to_thread.run_sync(thread.join)
    assert (ends, loader.calls) == (["refused"] * (num_threads - 1) + ["served"], 1)


@pytest.mark.parametrize("in_thread", [False, True])
async def test_a_client_that_leaves_during_the_start_is_let_go_and_costs_no_step(
    in_thread: bool,
) -> None:
    door = Door()
    loader = Loader(door.wait)
    watching: list[None] = []
    binding = RequestBinding(lambda: watching.append(None))
    ends: list[str] = []
    async with running(Engine("toy", loader=loader)) as engine:

        async def use() -> None:
            token = current_binding.set(binding)
            try:
                if in_thread:
                    await anyio.to_thread.run_sync(lambda: engine.generate_sync(prompt="hello"))
                else:
                    await engine.generate(prompt="hello")
            except ClientDisconnected:
                ends.append(engine.state)
            finally:
                current_binding.reset(token)

        with anyio.fail_after(GUARD_SECONDS):
            async with anyio.create_task_group() as group:
                group.start_soon(use)
                while not watching:
                    await anyio.lowlevel.checkpoint()
                binding.disconnect("before_response")
            assert ends == ["starting"]  # at once, not when the model is there
            door.open()
            # Whoever came after it is served; nothing was computed for the one who left.
            output = await engine.generate(prompt="hello", params=tokens(2))
            await settle(engine)
        [model] = loader.loaded
        rows = model.executor.rows  # type: ignore[attr-defined]
        assert {row.request_id for row in rows} == {output.request_id}
    assert watching == [None]


async def test_a_client_that_stays_is_served_after_the_start_and_watched_once() -> None:
    door = Door()
    watching: list[None] = []
    binding = RequestBinding(lambda: watching.append(None))
    async with running(Engine("toy", loader=Loader(door.wait))) as engine:
        token = current_binding.set(binding)
        try:
            with anyio.fail_after(GUARD_SECONDS):
                async with anyio.create_task_group() as group:
                    group.start_soon(_open_when, door, watching)
                    output = await engine.generate(prompt="hello", params=tokens(3))
        finally:
            current_binding.reset(token)
    assert (len(output.token_ids), watching) == (3, [None])
    assert binding._waiting == set()


async def test_a_failed_start_reaches_a_bound_request_as_it_is() -> None:
    def fail() -> None:
        raise ModelLoadError("no such file")

    async with running(Engine("toy", loader=Loader(fail))) as engine:
        token = current_binding.set(RequestBinding())
        try:
            with pytest.raises(ModelLoadError, match="no such file"):
                await engine.generate(prompt="hello")
        finally:
            current_binding.reset(token)


async def test_whatever_a_loader_raises_is_a_model_load_error_with_its_words() -> None:
    def fail() -> None:
        raise RuntimeError("Cannot re-initialize CUDA in forked subprocess")

    async with running(Engine("toy", loader=Loader(fail))) as engine:
        with pytest.raises(ModelLoadError, match="RuntimeError: Cannot re-init") as caught:
            await engine.start()
        assert isinstance(caught.value.__cause__, RuntimeError)
        assert engine.state == "new"


def test_the_setting_is_checked() -> None:
    with pytest.raises(ValueError, match="cold_start must be 'wait' or 'refuse', got 'no'"):
        EngineConfig(cold_start="no")  # type: ignore[arg-type]


async def _open_when(door: Door, watching: list[None]) -> None:
    while not watching:
        await anyio.lowlevel.checkpoint()
    door.open()
