"""The one place that knows native event loops."""

from __future__ import annotations

import asyncio
import sys
import threading
from contextvars import ContextVar
from types import ModuleType
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest

from qwen3_asgi.engine.portal import LoopClosed, LoopPortal, in_event_loop

variable: ContextVar[str] = ContextVar("variable", default="unset")


@pytest.mark.anyio
async def test_the_running_loop_is_the_one_that_anyio_names() -> None:
    portal = LoopPortal.current()
    assert portal.native is anyio.lowlevel.current_token().native_token
    assert portal.is_here
    assert in_event_loop()
    assert not await anyio.to_thread.run_sync(lambda: portal.is_here)
    assert not await anyio.to_thread.run_sync(in_event_loop)


@pytest.mark.anyio
async def test_a_bare_callback_is_in_the_loop() -> None:
    portal = LoopPortal.current()
    seen: list[bool] = []
    done = anyio.Event()

    def callback() -> None:
        seen.extend([in_event_loop(), portal.is_here])
        done.set()

    await anyio.to_thread.run_sync(portal.call_soon, callback)
    await done.wait()
    assert seen == [True, True]


def test_a_thread_without_a_loop_has_none() -> None:
    assert not in_event_loop()
    with pytest.raises(RuntimeError, match="no asyncio or trio event loop"):
        LoopPortal.current()


def test_a_trio_that_is_just_being_imported_runs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread may be in the middle of its first import; the name is there already."""
    monkeypatch.setitem(sys.modules, "trio", ModuleType("trio"))
    assert not in_event_loop()


def test_trio_as_a_guest_of_asyncio_is_told_from_its_host() -> None:
    trio = pytest.importorskip("trio")
    seen: dict[str, Any] = {}

    async def guest() -> None:
        seen["guest"] = LoopPortal.current().native
        await trio.sleep(0)

    async def host() -> None:
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        trio.lowlevel.start_guest_run(
            guest,
            run_sync_soon_threadsafe=loop.call_soon_threadsafe,
            done_callback=lambda outcome: done.set_result(outcome.unwrap()),
        )
        while not done.done():
            seen["host"] = LoopPortal.current().native
            await asyncio.sleep(0)
        assert seen["host"] is loop

    asyncio.run(host())
    assert isinstance(seen["guest"], trio.lowlevel.TrioToken)


@pytest.mark.anyio
@pytest.mark.parametrize("from_thread", [False, True], ids=["from the loop", "from a thread"])
async def test_a_spawned_task_has_the_context_of_who_asked(from_thread: bool) -> None:
    portal = LoopPortal.current()
    seen: list[str] = []
    tasks: list[object] = []
    done = anyio.Event()

    async def task() -> None:
        with anyio.CancelScope():  # what a bare callback could not make
            await anyio.lowlevel.checkpoint()
        seen.append(variable.get())
        done.set()

    def spawn() -> None:
        tasks.append(portal.spawn(task))

    variable.set("the request's")
    if from_thread:
        await anyio.to_thread.run_sync(portal.call_soon, spawn)
    else:
        spawn()
    await done.wait()
    assert seen == ["the request's"]


@pytest.mark.skipif(sys.version_info < (3, 12), reason="eager tasks came with Python 3.12")
def test_an_eager_task_factory_runs_a_spawned_task_at_once() -> None:
    async def main() -> None:
        asyncio.get_running_loop().set_task_factory(vars(asyncio)["eager_task_factory"])
        seen: list[bool] = []

        async def task() -> None:
            with anyio.CancelScope():
                seen.append(LoopPortal.current().is_here)
                await anyio.lowlevel.checkpoint()

        tasks = [LoopPortal.current().spawn(task)]
        assert seen == [True]
        await asyncio.gather(*tasks)

    asyncio.run(main())


def test_a_closed_loop_says_so() -> None:
    portals: list[LoopPortal] = []

    async def main() -> None:
        portals.append(LoopPortal.current())

    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    thread.join()
    with pytest.raises(LoopClosed):
        portals[0].call_soon(lambda: None)
    assert portals[0].is_closed
