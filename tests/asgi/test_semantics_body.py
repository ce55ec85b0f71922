"""Request bodies and answers pass in both directions at once, held back by whoever is slower."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel
import pytest
from starlette.requests import ClientDisconnect, Request

from qwen3_asgi import ClientDisconnected
from tests.asgi.staged import answer, served, watched
from tests.asgi.wire import DISCONNECT, EMPTY, END, START, Wire, chunk, part
from tests.engine.engines import LONG, quiet

if TYPE_CHECKING:
    from starlette.types import Message, Receive, Scope, Send

    from tests.asgi.staged import Stage

pytestmark = pytest.mark.anyio

PIECE = 40_000
PIECES = 5_000
# What may be on its way: a buffer as large as a server's own, and the piece that overflows it.
AHEAD = 64 * 1024 + PIECE


class Upload:
    """A server with a 200 MB body, which counts what it has handed over and nobody has used."""

    def __init__(self) -> None:
        self.given = 0
        self.used = 0
        self.most_ahead = 0

    async def receive(self) -> Message:
        await anyio.lowlevel.checkpoint()
        if self.given == PIECES * PIECE:
            await anyio.sleep_forever()
        body = (self.given // PIECE).to_bytes(4) * (PIECE // 4)
        self.given += PIECE
        self.most_ahead = max(self.most_ahead, self.given - self.used)
        return part(body, more=self.given < PIECES * PIECE)


@pytest.mark.parametrize("generating", [False, True])
async def test_a_200_mb_upload_is_never_in_memory(stage: Stage, generating: bool) -> None:
    upload = Upload()
    wire = Wire()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        handle = None
        if generating:
            handle = await stage.engine.submit(prompt="hello", params=LONG)
        for number in range(PIECES):
            if number in (100, 2000):  # the app is slow here: the server is not asked for more
                await quiet(500)
            message = await receive()
            upload.used += len(message["body"])
            assert message["body"][:4] == number.to_bytes(4)
            assert message["more_body"] == (number < PIECES - 1)
        if handle is not None:
            assert handle.finish is None
            handle.cancel()
        await answer(send)

    wire.receive = upload.receive  # type: ignore[method-assign]
    async with served(watched(app), wire):
        pass
    assert upload.used == PIECES * PIECE
    if generating:
        assert PIECE < upload.most_ahead <= AHEAD
    else:
        assert upload.most_ahead == PIECE, "only what the app itself has asked for"


@pytest.mark.parametrize("generating", [False, True])
async def test_the_app_may_read_on_after_it_began_to_answer(stage: Stage, generating: bool) -> None:
    """In lockstep: each part is sent only when the answer to the one before has arrived."""
    wire = Wire(part(b"0"))

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if generating:
            handle = await stage.engine.submit(prompt="hello", params=LONG)
            stage.notes.append(handle)
        await send(START)
        more = True
        while more:
            message = await receive()
            more = message["more_body"]
            await send(chunk(message["body"]))
        await send(END)

    async with served(watched(app), wire):
        for number in range(100):
            while len(wire.sent) < 2 + number:
                await anyio.lowlevel.checkpoint()
            last = number == 99
            wire.put(part(str(number + 1).encode(), more=not last))
    answered = [message["body"] for message in wire.sent[1:]]
    assert answered == [str(number).encode() for number in range(101)] + [b""]
    assert wire.most_readers == 1


async def test_a_client_that_leaves_a_conversation_ends_what_it_started(stage: Stage) -> None:
    """The server has told the app's own `receive`, not the watcher's: that counts as well."""
    wire = Wire(part(b"a"))

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(START)
        async with anyio.create_task_group() as group:
            group.start_soon(generate)
            while (message := await receive())["type"] != "http.disconnect":
                await send(chunk(message["body"]))
            stage.notes.append("read to the end")

    async def generate() -> None:
        with pytest.raises(ClientDisconnected):
            await stage.engine.generate(prompt="hello", params=LONG)
        stage.notes.append("told")

    async with served(watched(app), wire):
        await stage.gate.held(1)
        wire.put(part(b"b"))
        await quiet()
        wire.put(DISCONNECT)
    assert sorted(stage.notes) == ["read to the end", "told"]
    assert [message["body"] for message in wire.sent[1:]] == [b"a", b"b"]
    assert wire.most_readers == 1
    await stage.gone()


async def test_starlettes_request_still_notices_by_itself_beside_a_generation(
    stage: Stage,
) -> None:
    """`is_disconnected` while the body is read, and `stream` that ends in the middle of it."""
    wire = Wire(part(b"a"))

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        async with anyio.create_task_group() as group:
            group.start_soon(generate)
            assert not await request.is_disconnected()
            with pytest.raises(ClientDisconnect):
                await read(request)
            assert await request.is_disconnected()

    async def read(request: Request) -> None:
        async for body in request.stream():
            stage.notes.append(body)
            assert not await request.is_disconnected()

    async def generate() -> None:
        with pytest.raises(ClientDisconnected):
            await stage.engine.generate(prompt="hello", params=LONG)
        stage.notes.append("told")

    async with served(watched(app), wire):
        await stage.gate.held(1)
        while stage.notes != [b"a"]:
            await anyio.lowlevel.checkpoint()
        wire.put(DISCONNECT)
    assert stage.notes == [b"a", "told"]
    await stage.gone()


@pytest.mark.parametrize("generating", [False, True])
async def test_a_client_that_reads_slowly_holds_the_app_back(
    stage: Stage, generating: bool
) -> None:
    """`send` returns when the server's does: nothing is stored in between."""
    taken = 0
    sending = anyio.Event()
    go_on = anyio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if generating:
            stage.notes.append(await stage.engine.submit(prompt="hello", params=LONG))
        await send(START)
        for number in range(100):
            await send(chunk(b"x"))
            stage.notes.append(number)
        await send(END)

    async def send_slowly(message: Message) -> None:
        nonlocal taken
        taken += 1
        if taken == 10:
            sending.set()
            await go_on.wait()

    wire = Wire(EMPTY)
    wire.send = send_slowly  # type: ignore[method-assign]
    async with served(watched(app), wire):
        await sending.wait()
        await quiet(100)
        assert taken == 10
        assert stage.notes[-1] == 7, "the eight chunks before the one that is stuck"
        go_on.set()
    assert taken == 102
