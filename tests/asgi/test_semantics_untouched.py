"""A request that never touches the engine is served as if the middleware were not there."""

from __future__ import annotations

import sqlite3
from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest
from hypothesis import given, settings
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from qwen3_asgi import DisconnectMiddleware
from tests.asgi.programs import Case, cases, observe
from tests.asgi.staged import answer, served, watched
from tests.asgi.wire import DISCONNECT, EMPTY, Wire, http_scope
from tests.engine.engines import quiet

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from starlette.middleware.base import RequestResponseEndpoint
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import ASGIApp, Receive, Scope, Send

    from qwen3_asgi.asgi.watch import CancelPolicy
    from tests.asgi.staged import Stage

pytestmark = pytest.mark.anyio


def plain(app: ASGIApp) -> ASGIApp:
    return app


def twice(app: ASGIApp) -> ASGIApp:
    return DisconnectMiddleware(DisconnectMiddleware(app))


def not_chosen(app: ASGIApp) -> ASGIApp:
    return DisconnectMiddleware(app, cancel=lambda scope: False)


@pytest.mark.parametrize("wrap", [DisconnectMiddleware, twice, not_chosen])
@settings(max_examples=150, deadline=None)
@given(case=cases)
async def test_app_and_server_see_the_same(wrap: Callable[[ASGIApp], ASGIApp], case: Case) -> None:
    """Every message, call, exception, context variable, task and cancellation."""
    expected: list[Any] = await observe(case, plain)
    assert await observe(case, wrap) == expected


async def test_the_hosts_middleware_outside_sees_which_route_was_taken() -> None:
    """Routers write into the scope; access logs and metrics outside of everything read it there."""
    seen = []

    async def hello(request: Request) -> Response:
        return PlainTextResponse(request.path_params["name"])

    async def access_log(request: Request, call_next: RequestResponseEndpoint) -> Response:
        response = await call_next(request)
        seen.append((request.scope.get("endpoint"), request.scope.get("path_params")))
        return response

    app = Starlette(
        routes=[Route("/hello/{name}", hello)],
        middleware=[
            Middleware(BaseHTTPMiddleware, dispatch=access_log),
            Middleware(DisconnectMiddleware),
        ],
    )
    wire = Wire(EMPTY)
    await app(http_scope(path="/hello/you"), wire.receive, wire.send)
    assert wire.sent[0]["status"] == 200
    assert seen == [(hello, {"name": "you"})]


class Ledger:
    """A transaction of a real database, half done until the test says so."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.halfway = anyio.Event()
        self.go_on = anyio.Event()
        self.ending = "none"

    async def transfer(self) -> None:
        """What a handler does: it must be both entries or none, and it must be known which."""
        connection = await self._run(self._open)
        try:
            await self._run(connection.execute, "insert into entry values ('from', -5)")
            self.halfway.set()
            await self.go_on.wait()
            await anyio.lowlevel.checkpoint()
            await self._run(connection.execute, "insert into entry values ('to', 5)")
            await self._run(connection.commit)
            self.ending = "committed"
        except BaseException:
            with anyio.CancelScope(shield=True):
                await self._run(connection.rollback)
            self.ending = "rolled back"
            raise
        finally:
            with anyio.CancelScope(shield=True):
                await self._run(connection.close)

    def entries(self) -> int:
        connection = sqlite3.connect(self.path)
        try:
            return int(connection.execute("select count(*) from entry").fetchone()[0])
        finally:
            connection.close()

    async def _run(self, function: Callable[..., Any], *args: Any) -> Any:
        return await anyio.to_thread.run_sync(function, *args)

    def _open(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self.path, check_same_thread=False)
        connection.execute("create table entry (account text, amount integer)")
        connection.commit()
        return connection


POLICIES = [("generations", "committed", 2), ("request", "rolled back", 0)]


@pytest.mark.parametrize(("cancel", "ending", "entries"), POLICIES)
async def test_a_transaction_is_cancelled_by_a_disconnect_only_if_that_is_asked_for(
    tmp_path: Path, cancel: CancelPolicy, ending: str, entries: int
) -> None:
    ledger = Ledger(tmp_path / "ledger")
    wire = Wire(EMPTY)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await ledger.transfer()
        await answer(send)

    async with served(watched(app, cancel), wire):
        await ledger.halfway.wait()
        wire.put(DISCONNECT)
        await quiet()
        ledger.go_on.set()
    assert (ledger.ending, ledger.entries()) == (ending, entries)


@pytest.mark.parametrize(("cancel", "ending", "entries"), POLICIES)
async def test_nor_is_one_beside_a_generation(
    tmp_path: Path, stage: Stage, cancel: CancelPolicy, ending: str, entries: int
) -> None:
    """The generation is cancelled, in the same request, at the same moment."""
    ledger = Ledger(tmp_path / "ledger")
    wire = Wire(EMPTY)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(generate)
            await ledger.transfer()

    async def generate() -> None:
        try:
            await stage.generate()
        except Exception as error:
            stage.notes.append(type(error).__name__)  # not raised: the group is not cancelled

    async with served(watched(app, cancel), wire):
        await stage.gate.held(1)
        await ledger.halfway.wait()
        wire.put(DISCONNECT)
        while "cleaned up" not in stage.notes:
            await anyio.lowlevel.checkpoint()
        await stage.gone()
        ledger.go_on.set()
    assert (ledger.ending, ledger.entries()) == (ending, entries)
    if cancel == "generations":
        assert stage.notes[1:] == ["cleaned up", "ClientDisconnected"]
