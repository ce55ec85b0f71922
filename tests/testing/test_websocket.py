"""`WebSocketSession` is a client of an app's endpoint: it talks, leaves, and is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anyio
import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.routing import WebSocketRoute
from starlette.websockets import WebSocketDisconnect

from qwen3_asgi import ClientDisconnected, DisconnectMiddleware, SamplingParams
from qwen3_asgi.testing import (
    StepGate,
    WebSocketClosed,
    WebSocketSession,
    assert_idle_async,
    fake_engine,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from starlette.types import Receive, Scope, Send
    from starlette.websockets import WebSocket

pytestmark = pytest.mark.anyio


def app(endpoint: Callable[[WebSocket], Awaitable[None]]) -> Starlette:
    return Starlette(
        routes=[WebSocketRoute("/ws/{name}", endpoint)],
        middleware=[Middleware(DisconnectMiddleware)],
    )


async def test_messages_go_both_ways() -> None:
    seen: list[Any] = []

    async def endpoint(ws: WebSocket) -> None:
        seen.extend([ws.path_params["name"], ws.query_params["q"], ws.headers["x-key"]])
        seen.append(ws.scope["subprotocols"])
        await ws.accept(subprotocol="v2")
        await ws.send_text((await ws.receive_text()).upper())
        await ws.send_bytes((await ws.receive_bytes())[::-1])
        await ws.send_json({"got": await ws.receive_json()})
        await ws.close(4000, "enough")

    session = WebSocketSession(
        app(endpoint), "/ws/me?q=1", headers={"X-Key": "k"}, subprotocols=["v1", "v2"]
    )
    with anyio.fail_after(10):
        async with session as ws:
            assert ws.subprotocol == "v2"
            await ws.send("hello")
            assert await ws.receive() == "HELLO"
            await ws.send(b"abc")
            assert await ws.receive() == b"cba"
            await ws.send_json([1])
            assert await ws.receive_json() == {"got": [1]}
            with pytest.raises(WebSocketClosed) as closed:
                await ws.receive()
            with pytest.raises(WebSocketClosed):
                await ws.send("too late")
    assert (closed.value.code, closed.value.reason) == (4000, "enough")
    assert seen == ["me", "1", "k", ["v1", "v2"]]


async def test_leaving_is_a_disconnect_that_ends_the_generation() -> None:
    gate = StepGate()
    engine = fake_engine(gate=gate)
    endings = []

    async def endpoint(ws: WebSocket) -> None:
        await ws.accept()
        params = SamplingParams(max_tokens=3000, ignore_eos=True)
        try:
            async for delta in engine.stream(prompt=await ws.receive_text(), params=params):
                await ws.send_text(delta.text)
        except ClientDisconnected as error:
            endings.append(error)
            raise

    async with engine:
        with anyio.fail_after(20):
            async with WebSocketSession(app(endpoint), "/ws/me") as ws:
                await ws.send("a long story")
                await ws.receive()
                gate.hold()
                held = await gate.held()
        assert len(endings) == 1  # while the step was still held
        gate.open()
        await assert_idle_async(engine)
        assert gate.arrived == held


async def test_what_was_sent_is_read_before_the_disconnect_and_its_code_is_told() -> None:
    seen: list[Any] = []

    async def endpoint(ws: WebSocket) -> None:
        await ws.accept()
        seen.append(await ws.receive_text())
        try:
            await ws.receive_text()
        except WebSocketDisconnect as error:
            seen.append((error.code, error.reason))

    async with WebSocketSession(app(endpoint), "/ws/me") as ws:
        await ws.send("last words")
        ws.disconnect(1001, "going away")
    assert seen == ["last words", (1001, "going away")]


@pytest.mark.parametrize("raises", [False, True])
async def test_sending_to_a_client_that_has_gone(raises: bool) -> None:
    notes: list[str] = []

    async def raw(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        notes.append((await receive())["type"])
        try:
            await send({"type": "websocket.send", "text": "x"})
            notes.append("swallowed")
        except OSError:
            notes.append("raised")

    async with WebSocketSession(raw, "/", raise_on_send=raises):
        pass
    assert notes == ["websocket.disconnect", "raised" if raises else "swallowed"]


async def connect(app: Any) -> str | bytes:
    with anyio.fail_after(10):
        async with WebSocketSession(app, "/ws/me") as ws:
            return await ws.receive()


async def test_a_refusal_and_errors_of_the_app_are_raised_bare() -> None:
    async def refuses(ws: WebSocket) -> None:
        await ws.close(4403, "no key")

    async def fails_first(ws: WebSocket) -> None:
        raise LookupError("before")

    async def fails_later(ws: WebSocket) -> None:
        await ws.accept()
        raise LookupError("after")

    async def returns(ws: WebSocket) -> None:
        await ws.accept()

    async def twice(scope: Scope, receive: Receive, send: Send) -> None:
        for _ in range(2):
            await send({"type": "websocket.accept"})

    with pytest.raises(WebSocketClosed) as refused:
        await connect(app(refuses))
    assert (refused.value.code, refused.value.reason) == (4403, "no key")
    for endpoint in (fails_first, fails_later):
        with pytest.raises(LookupError):
            await connect(app(endpoint))
    with pytest.raises(WebSocketClosed) as closed:
        await connect(app(returns))
    assert closed.value.code == 1006
    with pytest.raises(RuntimeError, match="out of place"):
        await connect(twice)


async def test_an_error_after_the_client_has_left_comes_out_of_leaving() -> None:
    async def endpoint(ws: WebSocket) -> None:
        await ws.accept()
        await ws.receive()
        raise LookupError("cleaning up")

    async def use() -> None:
        async with WebSocketSession(app(endpoint), "/ws/me"):
            pass

    with pytest.raises(LookupError):
        await use()
