"""The transport demands what servers demand, and holds a fast app back as they do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel
import httpx
import pytest

from tests.testing.client import END, START, chunk, client

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

pytestmark = pytest.mark.anyio


def start(status: int = 200, *headers: tuple[bytes, bytes]) -> Message:
    return {"type": "http.response.start", "status": status, "headers": headers}


def sends(*messages: Message) -> ASGIApp:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        for message in messages:
            await send(message)

    return app


LENGTH_3 = (b"Content-Length", b"3")
BROKEN: dict[str, tuple[list[Message], str]] = {
    "nothing": ([], "without sending a response"),
    "half": ([START, chunk(b"x")], "before its response was complete"),
    "body first": ([END], "'http.response.start' was to come"),
    "two starts": ([START, START], "'http.response.body' was to come"),
    "too late": ([START, END, END], "after its response was complete"),
    "unknown": ([START, {"type": "http.response.pathsend"}], "'http.response.body' was to come"),
    "too long": ([start(200, LENGTH_3), chunk(b"four")], "Content-Length is 3"),
    "too short": ([start(200, LENGTH_3), chunk(b"aa"), END], "only 2 bytes"),
    "204 with a body": ([start(204), chunk(b"x")], "which has none"),
}


@pytest.mark.parametrize("case", BROKEN)
async def test_an_app_that_breaks_the_rules_raises(case: str) -> None:
    messages, message = BROKEN[case]
    error: BaseException | None = None
    try:
        async with client(sends(*messages)) as (http, _):
            await http.get("/")
    except RuntimeError as raised:
        error = raised
    assert message in str(error)


async def test_a_client_of_a_broken_app_sees_what_it_would_behind_a_server() -> None:
    async with client(sends(), raise_app_exceptions=False) as (http, _):
        assert (await http.get("/")).status_code == 500
    async with client(sends(START, chunk(b"x")), raise_app_exceptions=False) as (http, _):
        with pytest.raises(httpx.RemoteProtocolError):
            await http.get("/")


async def test_what_is_raised_after_the_response_is_not_the_clients() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(START)
        await send(END)
        await read.wait()
        raise LookupError("in a background task")

    read = anyio.Event()
    async with client(app) as (http, transport):
        assert (await http.get("/")).status_code == 201
        read.set()
        with pytest.raises(LookupError):
            await transport.ended()


async def test_head_has_the_headers_and_no_body() -> None:
    async with client(sends(start(200, LENGTH_3), chunk(b"abc"), END)) as (http, _):
        response = await http.head("/")
        assert (response.headers["content-length"], response.content) == ("3", b"")
        assert (await http.get("/")).content == b"abc"


@pytest.mark.parametrize("status", [204, 304])
async def test_no_body_is_no_error_where_there_is_none(status: int) -> None:
    async with client(sends(start(status, LENGTH_3) if status == 304 else start(status), END)) as (
        http,
        _,
    ):
        assert (await http.get("/")).status_code == status


async def test_an_app_that_sends_faster_than_the_client_reads_waits() -> None:
    sent = 0

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal sent
        await send(START)
        for _ in range(10):
            await send(chunk(bytes(100)))
            sent += 1
        await send(END)

    async with client(app, high_water_bytes=250) as (http, _), http.stream("GET", "/") as response:
        await settle()
        # Servers, too, take the message that goes over the mark.
        assert sent == 3
        pieces = response.aiter_raw()
        await anext(pieces)
        await settle()
        assert sent == 4
        assert len([piece async for piece in pieces]) == 9
    assert sent == 10


async def test_a_client_that_leaves_lets_go_an_app_that_waits_in_send() -> None:
    notes: list[Any] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send(START)
        for _ in range(3):
            await send(chunk(bytes(100)))
        notes.append((await receive())["type"])

    async with client(app, high_water_bytes=100) as (http, _), http.stream("GET", "/"):
        await settle()
        assert notes == []
    assert notes == ["http.disconnect"]


async def test_the_lifespan_runs_around_everything_and_its_state_is_the_requests() -> None:
    notes: list[Any] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            notes.append(scope["state"]["db"])
            scope["state"]["db"] = "of this request alone"
            await sends(START, END)(scope, receive, send)
            return
        notes.append((await receive())["type"])
        scope["state"]["db"] = "open"
        await send({"type": "lifespan.startup.complete"})
        notes.append((await receive())["type"])
        await send({"type": "lifespan.shutdown.complete"})

    async with client(app, lifespan=True) as (http, _):
        await http.get("/")
        await http.get("/")
        assert notes == ["lifespan.startup", "open", "open"]
    assert notes[-1] == "lifespan.shutdown"


async def settle() -> None:
    """Until the app waits: nothing here depends on threads or time."""
    for _ in range(50):
        await anyio.lowlevel.checkpoint()
