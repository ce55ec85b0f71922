"""The watch at message level: `cancel="request"`, nesting, and websockets."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel
import pytest

from qwen3_asgi.asgi.watch import DisconnectWatch
from tests.asgi.staged import answer, served, watched
from tests.asgi.wire import DISCONNECT, EMPTY, Wire, http_scope
from tests.engine.engines import quiet, tokens

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from tests.asgi.staged import Stage

pytestmark = pytest.mark.anyio


async def test_the_request_policy_cancels_a_handler_outside_the_engine() -> None:
    wire = Wire(EMPTY)
    notes = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await anyio.sleep_forever()
        except anyio.get_cancelled_exc_class():
            notes.append("cancelled")
            raise

    async with served(watched(app, "request"), wire):
        await quiet()
        wire.put(DISCONNECT)
    assert notes == ["cancelled"]
    assert wire.sent[0]["status"] == 499


async def test_the_request_policy_leaves_background_work_alone_after_the_response() -> None:
    wire = Wire(EMPTY)
    notes = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await answer(send)
        wire.put(DISCONNECT)
        await quiet()
        assert await receive() == EMPTY
        assert await receive() == DISCONNECT
        await quiet()
        notes.append("ran on")

    async with served(watched(app, "request"), wire):
        pass
    assert notes == ["ran on"]


async def test_a_predicate_chooses_per_request() -> None:
    notes = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        await quiet()
        notes.append(scope["path"])

    app_with_predicate = watched(app, lambda scope: scope["path"] == "/cancel")
    for path in ("/keep", "/cancel"):
        wire = Wire(EMPTY, DISCONNECT)
        async with served(app_with_predicate, wire, scope=http_scope(path=path)):
            pass
    assert notes == ["/keep"]


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(ValueError, match="cancel must be"):
        DisconnectWatch(lambda *_: None, cancel="everything")  # type: ignore[arg-type]


async def test_a_nested_watch_joins_the_outer_one(stage: Stage) -> None:
    wire = Wire(EMPTY)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await stage.generate()

    async with served(watched(watched(watched(app))), wire):
        await stage.gate.held(1)
        wire.put(DISCONNECT)
    assert stage.notes[1:] == ["cleaned up"]
    assert wire.most_readers == 1
    assert wire.sent_types == ["http.response.start", "http.response.body"]
    await stage.gone()


async def test_a_nested_request_policy_is_cancelled_by_the_outer_watcher() -> None:
    wire = Wire(EMPTY)
    notes = []

    async def inner(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await anyio.sleep_forever()
        finally:
            notes.append("inner cancelled")

    async def outer(scope: Scope, receive: Receive, send: Send) -> None:
        await watched(inner, "request")(scope, receive, send)
        await quiet()
        notes.append("outer runs on")

    async with served(watched(outer), wire):
        await quiet()
        wire.put(DISCONNECT)
    assert notes == ["inner cancelled", "outer runs on"]
    assert wire.most_readers == 1
    assert [m["status"] for m in wire.sent if m["type"] == "http.response.start"] == [499]


async def test_a_nested_request_policy_entered_after_the_disconnect_does_not_start() -> None:
    wire = Wire(EMPTY, DISCONNECT)
    notes: list[str] = []

    async def inner(scope: Scope, receive: Receive, send: Send) -> None:
        await anyio.lowlevel.checkpoint()
        notes.append("ran")

    async def outer(scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        await watched(inner, "request")(scope, receive, send)

    async with served(watched(outer), wire):
        pass
    assert notes == []


async def test_a_websocket_disconnect_ends_its_generation(stage: Stage) -> None:
    end = {"type": "websocket.disconnect", "code": 1001}
    wire = Wire({"type": "websocket.connect"}, {"type": "websocket.receive", "text": "hello"})

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        assert (await receive())["type"] == "websocket.connect"
        await send({"type": "websocket.accept"})
        assert (await receive())["text"] == "hello"
        try:
            await stage.generate()
        finally:
            stage.notes.extend([await receive(), await receive()])

    late = {"type": "websocket.receive", "text": "late"}
    async with served(watched(app), wire, scope={"type": "websocket", "path": "/"}):
        await stage.gate.held(1)
        wire.put(late, end)
    assert stage.notes[-2:] == [late, end]
    assert wire.sent == [{"type": "websocket.accept"}]
    await stage.gone()


async def test_closing_a_websocket_completes_it(stage: Stage) -> None:
    wire = Wire()
    stage.gate.open()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "websocket.accept"})
        await stage.engine.generate(prompt="hello", params=tokens(2))
        await send({"type": "websocket.close", "code": 1000})
        wire.put({"type": "websocket.disconnect", "code": 1000})
        await quiet()
        output = await stage.engine.generate(prompt="hello", params=tokens(20))
        stage.notes.append(len(output.token_ids))

    async with served(watched(app), wire, scope={"type": "websocket", "path": "/"}):
        pass
    assert stage.notes == [20]
