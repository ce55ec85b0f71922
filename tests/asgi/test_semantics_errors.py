"""Exceptions and context variables of a request that generates: as if nothing watched it."""

from __future__ import annotations

import asyncio
import traceback
from contextvars import ContextVar
from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.routing import Route

from qwen3_asgi import DisconnectMiddleware
from tests.asgi.staged import answer, served, watched
from tests.asgi.wire import EMPTY, Wire, http_scope
from tests.engine.engines import LONG, tokens

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import Receive, Scope, Send

    from qwen3_asgi.asgi.watch import CancelPolicy
    from tests.asgi.staged import Stage

pytestmark = pytest.mark.anyio

variable: ContextVar[str] = ContextVar("variable", default="unset")


class Boom(Exception):
    pass


def fails() -> None:
    try:
        raise KeyError("the reason")
    except KeyError as reason:
        reason.add_note("a note")
        raise Boom from reason


def middle() -> None:
    try:
        fails()
    except Boom as boom:
        boom.add_note("seen in the middle")
        raise


@pytest.mark.parametrize("cancel", ["generations", "request"])
async def test_the_hosts_handler_gets_the_very_exception_with_all_that_hangs_on_it(
    stage: Stage, cancel: CancelPolicy
) -> None:
    stage.gate.open()
    handled: list[Exception] = []

    async def handle(request: Request, error: Exception) -> Response:
        handled.append(error)
        return PlainTextResponse("sorry", status_code=500)

    async def endpoint(request: Request) -> Response:
        await stage.engine.generate(prompt="hello", params=tokens(1))
        try:
            middle()
        except Boom as error:
            raised.append(error)
            raise
        raise AssertionError

    raised: list[Exception] = []
    # Starlette's handler for `Exception` is outside of all middleware, ours too.
    app = Starlette(
        routes=[Route("/", endpoint)],
        middleware=[Middleware(DisconnectMiddleware, cancel=cancel)],
        exception_handlers={Exception: handle},
    )
    wire = Wire(EMPTY)
    with pytest.raises(Boom) as left:
        await app(http_scope(), wire.receive, wire.send)
    error = raised[0]
    assert handled == [error]
    assert left.value is error
    assert wire.sent[0]["status"] == 500
    assert isinstance(error.__cause__, KeyError)
    assert error.__context__ is error.__cause__
    assert error.__cause__.__notes__ == ["a note"]
    assert error.__notes__ == ["seen in the middle"]
    names = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
    assert names[-3:] == ["endpoint", "middle", "fails"]


@pytest.mark.parametrize("cancel", ["generations", "request"])
@pytest.mark.parametrize("generates", [False, True])
async def test_an_exception_keeps_its_context_though_the_caller_handles_another(
    stage: Stage, generates: bool, cancel: CancelPolicy
) -> None:
    """A host that falls back to another app in an `except` block: both stories must survive."""
    stage.gate.open()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if generates:
            await stage.engine.generate(prompt="hello", params=tokens(1))
        middle()

    wire = Wire(EMPTY)
    try:
        try:
            raise LookupError("no such route")
        except LookupError:
            await watched(app, cancel)(http_scope(), wire.receive, wire.send)
    except Boom as caught:
        error = caught
    assert isinstance(error.__context__, KeyError)
    assert isinstance(error.__context__.__context__, LookupError)


@pytest.mark.parametrize("cancel", ["generations", "request"])
async def test_what_a_generating_request_sets_is_seen_where_it_was_before(
    stage: Stage, cancel: CancelPolicy, anyio_backend_name: str
) -> None:
    stage.gate.open()
    wire = Wire(EMPTY)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        assert anyio.get_current_task().id == task
        assert variable.get() == "outside"
        variable.set("before")
        await stage.engine.generate(prompt="hello", params=tokens(1))
        assert variable.get() == "before"
        assert await anyio.to_thread.run_sync(variable.get) == "before"
        variable.set("inside")
        await answer(send)

    variable.set("outside")
    task = anyio.get_current_task().id
    before = {other.id for other in anyio.get_running_tasks()}
    await watched(app, cancel)(http_scope(), wire.receive, wire.send)
    assert variable.get() == "inside"
    assert {other.id for other in anyio.get_running_tasks()} == before, "the watcher has ended"
    if anyio_backend_name == "asyncio":
        current = asyncio.current_task()
        assert current is not None
        assert current.cancelling() == 0
    # Nobody is bound to the request that is over.
    assert len((await stage.engine.generate(prompt="hello", params=tokens(2))).token_ids) == 2


async def test_what_a_callback_of_the_request_sets_stays_with_it(stage: Stage) -> None:
    """Two requests on one connection's task, one after the other, as some servers run them."""
    stage.gate.open()
    seen = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(variable.get())
        variable.set(scope["path"])
        await stage.engine.generate(prompt="hello", params=tokens(1))
        await answer(send)

    variable.set("outside")
    for path in ("/first", "/second"):
        wire = Wire(EMPTY)
        await watched(app)(http_scope(path=path), wire.receive, wire.send)
    assert seen == ["outside", "/first"], "as without: the server's task has one context"


@pytest.mark.parametrize("spec_version", ["2.3", "2.4"])
@pytest.mark.parametrize("cancel", ["generations", "request"])
async def test_a_server_that_raises_from_send_ends_a_stream(
    stage: Stage, spec_version: str, cancel: CancelPolicy
) -> None:
    """From spec 2.4 on Starlette's own streams wait for that and do not look at `receive`."""
    error = OSError("connection lost")

    async def lines() -> AsyncIterator[str]:
        async for delta in stage.engine.stream(prompt="hello", params=LONG):
            yield delta.text + "\n"

    async def stream(request: Request) -> Response:
        return StreamingResponse(lines())

    app = Starlette(
        routes=[Route("/", stream)], middleware=[Middleware(DisconnectMiddleware, cancel=cancel)]
    )
    wire = Wire(EMPTY)
    scope = http_scope(asgi={"version": "3.0", "spec_version": spec_version})
    ended: list[BaseException] = []

    async def serve() -> None:
        async with served(app, wire, scope=scope):
            stage.gate.allow(2)
            await stage.gate.held(3)
            while len(wire.sent) < 2:  # the start, and two tokens in one piece or two
                await anyio.lowlevel.checkpoint()
            wire.send_error = error
            stage.gate.allow(1)

    try:
        await serve()
    except BaseException as raised:
        ended.append(raised)
    await stage.gone(steps=4)
    assert ended, "the host's error handling hears of it, as without the middleware"
    assert wire.sent_types.count("http.response.start") == 1
