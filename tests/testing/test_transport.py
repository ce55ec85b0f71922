"""The transport behaves as a real server does: it streams, and the app hears of a hang-up."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel
import httpx
import pytest

from qwen3_asgi.testing import DisconnectingASGITransport
from tests.testing.client import END, START, chunk, client

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

pytestmark = pytest.mark.anyio


async def test_the_request_reaches_the_app_as_it_was_sent() -> None:
    seen: list[object] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.extend([scope, await receive()])
        await send(START)
        await send(END)
        seen.append(await receive())

    async with client(app) as (http, _):
        response = await http.post("/a/b?c=d", content=b"body", headers={"X-Name": "v"})
    scope, body, last = seen
    assert (response.status_code, response.headers["x-a"], response.content) == (201, "b", b"")
    assert isinstance(scope, dict)
    assert (scope["method"], scope["path"], scope["query_string"]) == ("POST", "/a/b", b"c=d")
    assert (b"x-name", b"v") in scope["headers"]
    assert scope["asgi"]["spec_version"] == "2.3"
    assert body == {"type": "http.request", "body": b"body", "more_body": False}
    assert last == {"type": "http.disconnect"}


async def test_a_chunk_is_visible_before_the_app_ends() -> None:
    go_on = anyio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(START)
        await send(chunk(b"first"))
        await go_on.wait()
        await send(chunk(b"second"))
        await send(END)

    received = []
    async with client(app) as (http, _), http.stream("GET", "/") as response:
        async for piece in response.aiter_raw():
            received.append(piece)
            go_on.set()
    assert received == [b"first", b"second"]


async def test_hanging_up_mid_stream_is_a_disconnect_and_cancels_nothing() -> None:
    notes: list[object] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send(START)
        await send(chunk(b"first"))
        notes.extend([await receive(), await receive()])
        await send(chunk(b"to nobody"))
        await anyio.lowlevel.checkpoint()
        notes.append("ran on")

    async with client(app) as (http, _), http.stream("GET", "/"):
        assert notes == []
    assert notes == [{"type": "http.disconnect"}] * 2 + ["ran on"]


async def test_hanging_up_before_the_response_is_a_disconnect() -> None:
    notes: list[object] = []
    started = anyio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        started.set()
        notes.append(await receive())
        await send(START)
        notes.append("ran on")

    async with client(app) as (http, _), anyio.create_task_group() as group:
        group.start_soon(http.get, "/")
        await started.wait()
        group.cancel_scope.cancel()
    assert notes == [{"type": "http.disconnect"}, "ran on"]


async def test_leaving_the_client_hangs_up_what_is_still_open() -> None:
    notes = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send(START)
        notes.append(await receive())

    async with client(app) as (http, _):
        response = await http.send(http.build_request("GET", "/"), stream=True)
    assert notes == [{"type": "http.disconnect"}]
    await response.aclose()


async def test_an_exception_before_the_response_comes_out_of_the_request() -> None:
    error = LookupError("app")

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise error

    async with client(app) as (http, _):
        with pytest.raises(LookupError) as caught:
            await http.get("/")
    assert caught.value is error


async def test_an_exception_mid_stream_comes_out_of_reading() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(START)
        await send(chunk(b"first"))
        raise LookupError("app")

    async with client(app) as (http, _):
        with pytest.raises(LookupError):
            await http.get("/")


async def test_an_exception_after_the_hang_up_comes_out_of_leaving_the_client() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send(START)
        await receive()
        raise LookupError("app")

    async def use() -> None:
        async with client(app) as (http, _), http.stream("GET", "/"):
            pass

    with pytest.raises(LookupError):
        await use()


async def test_exceptions_can_be_turned_into_what_a_client_would_see() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/late":
            await send(START)
            await send(chunk(b"cut"))
        raise LookupError("app")

    async with client(app, raise_app_exceptions=False) as (http, _):
        assert (await http.get("/early")).status_code == 500
        async with http.stream("GET", "/late") as response:
            pieces = response.aiter_raw()
            assert await anext(pieces) == b"cut"
            with pytest.raises(httpx.RemoteProtocolError):
                await anext(pieces)


async def test_an_error_of_the_test_itself_comes_out_bare_and_ends_the_app() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(START)
        await anyio.sleep_forever()

    async def use() -> None:
        async with client(app) as (http, _), http.stream("GET", "/"):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await use()


async def test_nothing_is_left_unclosed() -> None:
    """A warning of a leaked stream is an error in this test suite."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        if scope["path"] == "/wait":
            await receive()
        await send(START)
        await send(chunk(b"x"))
        await receive()

    async with client(app) as (http, _):
        async with http.stream("GET", "/"):
            pass
        with anyio.move_on_after(0.001):
            await http.get("/wait")
    gc.collect()


async def test_it_is_used_as_a_context_manager() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise NotImplementedError

    http = httpx.AsyncClient(transport=DisconnectingASGITransport(app), base_url="http://test")
    with pytest.raises(RuntimeError, match="context manager"):
        await http.get("/")
