"""A request body reaches the app as it is read, and the client may leave in the middle of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anyio
import pytest

from qwen3_asgi.testing import HungUp
from tests.testing.client import DISCONNECT, END, START, chunk, client

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from starlette.types import Message, Receive, Scope, Send

pytestmark = pytest.mark.anyio


def part(body: bytes, *, more: bool = True) -> Message:
    return {"type": "http.request", "body": body, "more_body": more}


class Upload:
    """A body whose next chunk is asked for when the app wants it; notes what was asked and how it
    ended."""

    def __init__(self, *chunks: bytes) -> None:
        self.chunks = chunks
        self.asked = 0
        self.end: str | None = None

    async def __call__(self) -> AsyncIterator[bytes]:
        try:
            for piece in self.chunks:
                self.asked += 1
                yield piece
            self.end = "exhausted"
        except BaseException as error:
            self.end = type(error).__name__
            raise


async def test_a_streamed_body_is_asked_for_chunk_by_chunk() -> None:
    upload = Upload(b"a", b"", b"b", b"c")
    seen: list[Any] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        while True:
            message = await receive()
            for _ in range(20):  # whoever reads ahead would do so now
                await anyio.lowlevel.checkpoint()
            seen.append((message["body"], upload.asked))
            if not message["more_body"]:
                break
        await send(START)
        await send(END)

    async with client(app) as (http, _):
        assert (await http.post("/", content=upload())).status_code == 201
    # The one that is asked for next is handed over, no more.
    assert seen == [(b"a", 3), (b"b", 4), (b"c", 4), (b"", 4)]
    assert upload.end == "exhausted"


async def test_a_large_body_comes_in_pieces_as_servers_cut_it() -> None:
    sizes = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        more = True
        while more:
            message = await receive()
            more = message["more_body"]
            sizes.append(len(message["body"]))
        await send(START)
        await send(END)

    async with client(app) as (http, _):
        await http.post("/", content=bytes(150_000))
    assert sizes == [65536, 65536, 150_000 - 2 * 65536]


async def test_the_answer_can_be_read_before_the_upload_is_over() -> None:
    go_on = anyio.Event()
    notes: list[Any] = []

    async def body() -> AsyncIterator[bytes]:
        yield b"first"
        await go_on.wait()
        yield b"second"

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(START)
        while (message := await receive())["more_body"]:
            await send(chunk(message["body"].upper()))
        await send(END)

    async with client(app) as (http, _), http.stream("POST", "/", content=body()) as response:
        async for piece in response.aiter_raw():
            notes.append(piece)
            go_on.set()
    assert notes == [b"FIRST", b"SECOND"]


async def test_leaving_in_the_middle_of_an_upload_is_a_disconnect_in_place_of_the_rest() -> None:
    read, notes = anyio.Event(), []
    ended = []

    async def body() -> AsyncIterator[bytes]:
        try:
            yield b"half"
            await anyio.sleep_forever()
        finally:
            ended.append(True)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        notes.append(await receive())
        read.set()
        notes.append(await receive())

    async def post() -> None:
        await http.post("/", content=body())

    async with client(app) as (http, _), anyio.create_task_group() as group:
        group.start_soon(post)
        await read.wait()
        group.cancel_scope.cancel()
    assert notes == [part(b"half"), DISCONNECT]
    assert ended == [True]


async def test_a_client_can_leave_after_so_many_bytes_of_its_upload() -> None:
    upload = Upload(b"abc", b"def", b"ghi", b"jkl")
    notes: list[Message] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        while (message := await receive())["type"] == "http.request":
            notes.append(message)

    async with client(app) as (http, transport):
        transport.hang_up_after(uploaded=5)
        with pytest.raises(HungUp):
            await http.post("/", content=upload())
        await transport.ended()
        assert notes == [part(b"abc"), part(b"def")]
        assert upload.asked <= 3
    assert upload.end in ("GeneratorExit", "CancelledError", "Cancelled")


async def test_what_the_body_raises_comes_out_of_the_request_and_is_a_disconnect() -> None:
    notes: list[Message] = []

    async def body() -> AsyncIterator[bytes]:
        yield b"half"
        raise LookupError("a file that has gone")

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        notes.extend([await receive(), await receive()])

    async with client(app) as (http, transport):
        with pytest.raises(LookupError):
            await http.post("/", content=body())
        await transport.ended()
    assert notes == [part(b"half"), DISCONNECT]


async def test_an_app_that_does_not_read_the_body_can_answer() -> None:
    upload = Upload(b"a", b"b", b"c")
    later: list[Message] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(START)
        await send(END)
        later.append(await receive())

    async with client(app) as (http, transport):
        assert (await http.post("/", content=upload())).status_code == 201
        await transport.ended()
    assert later == [DISCONNECT]
    assert upload.asked <= 1


async def test_an_app_that_fails_before_the_upload_begins_ends_it() -> None:
    upload = Upload(b"a")

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise LookupError("at once")

    async with client(app) as (http, _):
        with pytest.raises(LookupError):
            await http.post("/", content=upload())
    assert upload.end in (None, "GeneratorExit")
