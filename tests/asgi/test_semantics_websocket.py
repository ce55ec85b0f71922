"""WebSockets: whatever a connection has started ends with it, and its messages stay in order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel
import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.responses import PlainTextResponse
from starlette.routing import WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from qwen3_asgi import ClientDisconnected, DisconnectMiddleware
from tests.asgi.staged import served, watched
from tests.asgi.wire import Wire
from tests.engine.engines import LONG, quiet, tokens

if TYPE_CHECKING:
    from starlette.types import Message, Receive, Scope, Send

    from tests.asgi.staged import Stage

pytestmark = pytest.mark.anyio

CONNECT: Message = {"type": "websocket.connect"}
GONE: Message = {"type": "websocket.disconnect", "code": 1006}


def says(text: str) -> Message:
    return {"type": "websocket.receive", "text": text}


def socket_scope(**fields: Any) -> Scope:
    return {"type": "websocket", "path": "/", "headers": [], "query_string": b""} | fields


async def test_a_chat_that_reads_and_generates_at_once(stage: Stage) -> None:
    """One task reads, others generate: all of it ends with the connection."""
    wire = Wire(CONNECT, says("one"))

    async def chat(websocket: WebSocket) -> None:
        await websocket.accept()
        try:
            async with anyio.create_task_group() as group:
                while True:
                    group.start_soon(reply, await websocket.receive_text())
        except* WebSocketDisconnect:
            stage.notes.append("hung up")

    async def reply(prompt: str) -> None:
        stage.notes.append(prompt)
        try:
            await stage.engine.generate(prompt=prompt, params=LONG)
        finally:
            stage.notes.append("ended")

    app = Starlette(
        routes=[WebSocketRoute("/", chat)], middleware=[Middleware(DisconnectMiddleware)]
    )
    async with served(app, wire, scope=socket_scope()):
        await stage.gate.held(1)
        wire.put(says("two"), says("three"))
        await stage.live(3)
        wire.put(GONE)
    assert stage.notes[:3] == ["one", "two", "three"]
    assert stage.notes.count("ended") == 3
    assert "hung up" in stage.notes
    assert wire.most_readers == 1
    await stage.gone()


async def test_the_second_generation_of_a_connection_is_watched_like_the_first(
    stage: Stage,
) -> None:
    wire = Wire(CONNECT, says("one"), says("two"))

    async def chat(scope: Scope, receive: Receive, send: Send) -> None:
        websocket = WebSocket(scope, receive, send)
        await websocket.accept()
        stage.gate.allow(3)
        output = await stage.engine.generate(
            prompt=await websocket.receive_text(), params=tokens(3)
        )
        await websocket.send_text(output.text)
        stage.notes.append(await websocket.receive_text())
        with pytest.raises(ClientDisconnected):
            await stage.engine.generate(prompt="two", params=LONG)
        with pytest.raises(WebSocketDisconnect) as closed:
            await websocket.receive_text()
        stage.notes.append(closed.value.code)

    async with served(watched(chat), wire, scope=socket_scope()):
        await stage.gate.held(4)
        wire.put(GONE)
    assert stage.notes == ["two", 1006]
    assert wire.sent_types == ["websocket.accept", "websocket.send"]
    await stage.gone(steps=4)


async def test_what_the_client_says_during_a_generation_arrives_in_order(stage: Stage) -> None:
    wire = Wire(CONNECT)

    async def chat(scope: Scope, receive: Receive, send: Send) -> None:
        websocket = WebSocket(scope, receive, send)
        await websocket.accept()
        await stage.engine.generate(prompt="hello", params=tokens(1))
        stage.notes.extend([await websocket.receive_text() for _ in range(200)])

    async with served(watched(chat), wire, scope=socket_scope()):
        await stage.gate.held(1)
        wire.put(*[says(str(number)) for number in range(200)])
        await quiet(300)
        # Watching is not swallowing: a client that talks on and on is held back by the server.
        assert 50 < wire.unread < 200
        stage.gate.open()
    assert stage.notes == [str(number) for number in range(200)]


async def test_a_client_that_leaves_before_it_was_accepted(stage: Stage) -> None:
    wire = Wire(CONNECT)

    async def chat(scope: Scope, receive: Receive, send: Send) -> None:
        await stage.generate()

    async with served(watched(chat), wire, scope=socket_scope()):
        await stage.gate.held(1)
        wire.put(GONE)
    assert isinstance(stage.notes[0], ClientDisconnected)
    # Without it uvicorn logs that the app has not answered the handshake.
    assert wire.sent == [{"type": "websocket.close", "code": 1001}]
    await stage.gone()


async def test_a_refusal_completes_a_websocket(stage: Stage) -> None:
    """With a response of its own instead of an accept; what runs on is nobody's request."""
    wire = Wire(CONNECT)
    stage.gate.open()

    async def chat(scope: Scope, receive: Receive, send: Send) -> None:
        websocket = WebSocket(scope, receive, send)
        await stage.engine.generate(prompt="may it?", params=tokens(2))
        await websocket.send_denial_response(PlainTextResponse("no", status_code=403))
        wire.put(GONE)
        await quiet()
        output = await stage.engine.generate(prompt="for the log", params=tokens(20))
        stage.notes.append(len(output.token_ids))

    scope = socket_scope(extensions={"websocket.http.response": {}})
    async with served(watched(chat), wire, scope=scope):
        pass
    assert stage.notes == [20]
    assert wire.sent_types[0] == "websocket.http.response.start"
