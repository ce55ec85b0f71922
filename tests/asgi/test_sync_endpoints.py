"""`generate_sync` in a request's threads: the disconnect is raised there, at once, on any loop."""

from __future__ import annotations

import asyncio
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest
from fastapi import FastAPI
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from qwen3_asgi import ClientDisconnected, DisconnectMiddleware
from qwen3_asgi.engine.portal import wait_future
from tests.asgi.staged import answer, served, watched
from tests.asgi.wire import DISCONNECT, EMPTY, Wire
from tests.engine.engines import LONG, settle, tokens

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.requests import Request
    from starlette.types import ASGIApp, Receive, Scope, Send

    from tests.asgi.staged import Stage

pytestmark = pytest.mark.anyio

# A thread starts with an empty context of its own, unless Python is told otherwise.
THREADS_INHERIT = bool(getattr(sys.flags, "thread_inherit_context", 0))


def generate(stage: Stage) -> None:
    """In a thread: note which one it was and how it ended."""
    try:
        stage.engine.generate_sync(prompt="hello", params=LONG)
    except ClientDisconnected:
        stage.notes.append(threading.get_ident())
        raise


def fastapi_app(stage: Stage) -> ASGIApp:
    app = FastAPI()

    @app.get("/")
    def endpoint() -> None:
        generate(stage)

    app.add_middleware(DisconnectMiddleware)
    return app


def starlette_app(stage: Stage) -> ASGIApp:
    def endpoint(request: Request) -> PlainTextResponse:
        generate(stage)
        return PlainTextResponse("")

    app = Starlette(routes=[Route("/", endpoint)])
    app.add_middleware(DisconnectMiddleware)
    return app


def raw_app(stage: Stage, in_thread: Callable[[Callable[[], None]], object]) -> ASGIApp:
    """An app that runs its work by `in_thread`, which may return an awaitable."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        waiting = in_thread(partial(generate, stage))
        if waiting is not None:
            await waiting  # type: ignore[misc]
        await answer(send)

    return watched(app)


async def in_own_thread(work: Callable[[], None]) -> None:
    """`threading.Thread` with the request's context; its error comes back by hand."""
    ended = threading.Event()
    errors: list[Exception] = []

    def run() -> None:
        try:
            work()
        except Exception as error:
            errors.append(error)
        ended.set()

    thread = threading.Thread(target=copy_context().run, args=(run,))
    thread.start()
    await anyio.to_thread.run_sync(ended.wait)
    thread.join()
    raise errors[0]


async def in_pool(work: Callable[[], None]) -> None:
    pool = ThreadPoolExecutor(1)
    future = pool.submit(copy_context().run, work)
    pool.shutdown(wait=False)
    await wait_future(future)


async def two_threads_deep(work: Callable[[], None]) -> None:
    await anyio.to_thread.run_sync(lambda: anyio.run(anyio.to_thread.run_sync, work))


WAYS: dict[str, Callable[[Stage], ASGIApp]] = {
    "FastAPI": fastapi_app,
    "Starlette": starlette_app,
    "anyio.to_thread": partial(raw_app, in_thread=anyio.to_thread.run_sync),
    "asyncio.to_thread": partial(raw_app, in_thread=asyncio.to_thread),
    "Thread with the context": partial(raw_app, in_thread=in_own_thread),
    "pool with the context": partial(raw_app, in_thread=in_pool),
    "a thread of a loop in a thread": partial(raw_app, in_thread=two_threads_deep),
}


@pytest.mark.parametrize("way", WAYS)
async def test_the_thread_is_told_while_the_step_is_still_held(
    stage: Stage, way: str, anyio_backend_name: str
) -> None:
    if way.startswith("asyncio") and anyio_backend_name != "asyncio":
        pytest.skip("asyncio's own")
    wire = Wire(EMPTY)
    async with served(WAYS[way](stage), wire):
        await stage.live(1)
        await stage.gate.held(1)
        wire.put(DISCONNECT)
        while not stage.notes:
            await anyio.lowlevel.checkpoint()
        assert stage.fake.plans == 1
        assert stage.gate.arrived == 1, "the step that was running is still running"
        assert stage.engine.load().num_running == 1
    assert stage.notes != [threading.get_ident()]
    await stage.gone()
    assert stage.fake.plans == 1


async def test_every_thread_of_the_request_is_told(stage: Stage) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        async def one() -> None:
            with pytest.raises(ClientDisconnected):
                await anyio.to_thread.run_sync(generate, stage)

        async with anyio.create_task_group() as group:
            for _ in range(6):
                group.start_soon(one)
        await answer(send)

    wire = Wire(EMPTY)
    async with served(watched(app), wire):
        await stage.live(6)
        await stage.gate.held(1)
        wire.put(DISCONNECT)
    assert len(set(stage.notes)) == 6
    assert stage.fake.plans == 1
    await stage.gone()


async def test_a_thread_that_goes_on_is_told_again_and_submits_nothing(stage: Stage) -> None:
    def stubborn() -> None:
        for _ in range(3):
            with pytest.raises(ClientDisconnected):
                stage.engine.generate_sync(prompt="hello", params=LONG)
            stage.notes.append(len(stage.engine._running().delivery))

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await anyio.to_thread.run_sync(stubborn)
        await answer(send)

    wire = Wire(EMPTY)
    async with served(watched(app), wire):
        await stage.live(1)
        await stage.gate.held(1)
        wire.put(DISCONNECT)
    assert stage.notes == [1, 1, 1], "the first one, which is not swept before the step ends"
    await stage.gone()


@pytest.mark.skipif(THREADS_INHERIT, reason="here every thread inherits its starter's context")
@pytest.mark.parametrize("pooled", [False, True], ids=["Thread", "ThreadPoolExecutor"])
async def test_a_thread_without_the_context_is_not_bound(stage: Stage, pooled: bool) -> None:
    """It generates for nobody's request, and runs on when the client of another has gone."""
    outputs: list[int] = []

    def unbound() -> None:
        output = stage.engine.generate_sync(prompt="hello", params=tokens(5))
        outputs.append(len(output.token_ids))

    threads: list[threading.Thread] = []
    pool = ThreadPoolExecutor(1)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if pooled:
            pool.submit(unbound)
        else:
            threads.append(threading.Thread(target=unbound))
            threads[0].start()
        await anyio.to_thread.run_sync(generate, stage)

    wire = Wire(EMPTY)
    async with served(watched(app), wire):
        await stage.live(2)
        await stage.gate.held(1)
        wire.put(DISCONNECT)
    assert len(stage.notes) == 1
    assert outputs == []
    stage.gate.open()
    await settle(stage.engine)
    for thread in threads:
        await anyio.to_thread.run_sync(thread.join)
    await anyio.to_thread.run_sync(pool.shutdown)
    assert outputs == [5]
