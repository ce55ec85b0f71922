"""`Inflow`: two readers of one `receive`, and no message lost, doubled or out of order."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio
import pytest

from qwen3_asgi.asgi.inflow import READ_AHEAD_BYTES, READ_AHEAD_MESSAGES, Inflow
from tests.asgi.wire import DISCONNECT, EMPTY, Wire, part
from tests.engine.engines import quiet

if TYPE_CHECKING:
    from starlette.types import Message

pytestmark = pytest.mark.anyio


class Counted(Inflow):
    """Counts its disconnect calls."""

    def __init__(self, wire: Wire) -> None:
        self.disconnects = 0
        super().__init__(wire.receive, self._count)

    def _count(self) -> None:
        self.disconnects += 1


async def test_without_a_watcher_every_read_is_the_servers() -> None:
    wire = Wire(part(b"a"), part(b"b", more=False), DISCONNECT)
    inflow = Counted(wire)
    received = [await inflow.receive() for _ in range(3)]
    assert received == [part(b"a"), part(b"b", more=False), DISCONNECT]
    assert (wire.calls, inflow.disconnects) == (3, 1)


async def test_the_same_message_objects_are_handed_on_in_order() -> None:
    messages = [part(bytes([i])) for i in range(20)]
    wire = Wire(*messages)
    inflow = Counted(wire)
    async with anyio.create_task_group() as group:
        group.start_soon(inflow.read_ahead)
        await quiet()
        received = [await inflow.receive() for _ in messages]
        group.cancel_scope.cancel()
    assert all(a is b for a, b in zip(received, messages, strict=True))
    assert wire.most_readers == 1


async def test_an_app_that_reads_while_the_watcher_reads_gets_the_message() -> None:
    wire = Wire()
    inflow = Counted(wire)
    received: list[Message] = []

    async def app() -> None:
        received.extend([await inflow.receive(), await inflow.receive()])

    async with anyio.create_task_group() as group:
        group.start_soon(inflow.read_ahead)
        await quiet()
        group.start_soon(app)
        await quiet()
        assert wire.calls == 1
        wire.put(part(b"a"))
        await quiet()
        wire.put(part(b"b"))
        await quiet()
        group.cancel_scope.cancel()
    assert received == [part(b"a"), part(b"b")]
    assert wire.most_readers == 1


async def test_a_watcher_that_starts_while_the_app_reads_waits_for_its_turn() -> None:
    wire = Wire()
    inflow = Counted(wire)
    received: list[Message] = []

    async def app() -> None:
        received.append(await inflow.receive())

    async with anyio.create_task_group() as group:
        group.start_soon(app)
        await quiet()
        group.start_soon(inflow.read_ahead)
        await quiet()
        wire.put(EMPTY, DISCONNECT)
    assert received == [EMPTY]
    assert (inflow.disconnects, wire.most_readers) == (1, 1)
    assert await inflow.receive() == DISCONNECT


async def test_an_app_whose_read_is_cancelled_hands_over_to_the_watcher() -> None:
    wire = Wire()
    inflow = Counted(wire)
    async with anyio.create_task_group() as group:
        with anyio.CancelScope() as scope:
            group.start_soon(inflow.read_ahead)
            group.start_soon(_cancel_when_blocked, scope)
            # The app is the first to read: the watcher has not run yet.
            await inflow.receive()
        wire.put(part(b"a"), DISCONNECT)
        await quiet()
    assert scope.cancelled_caught
    assert [await inflow.receive(), await inflow.receive()] == [part(b"a"), DISCONNECT]
    assert (inflow.disconnects, wire.most_readers) == (1, 1)


async def test_an_app_that_is_cancelled_while_it_waits_for_the_watcher_loses_nothing() -> None:
    wire = Wire()
    inflow = Counted(wire)
    async with anyio.create_task_group() as group:
        group.start_soon(inflow.read_ahead)
        await quiet()
        with anyio.CancelScope() as scope:
            group.start_soon(_cancel_when_blocked, scope)
            await inflow.receive()
        wire.put(part(b"a"))
        await quiet()
        assert await inflow.receive() == part(b"a")
        group.cancel_scope.cancel()


async def test_a_watcher_that_is_cancelled_hands_over_to_the_app() -> None:
    wire = Wire()
    inflow = Counted(wire)
    received: list[Message] = []
    watcher = anyio.CancelScope()

    async def watch() -> None:
        with watcher:
            await inflow.read_ahead()

    async def app() -> None:
        received.append(await inflow.receive())

    async with anyio.create_task_group() as group:
        group.start_soon(watch)
        await quiet()
        group.start_soon(app)
        await quiet()
        watcher.cancel()
        await quiet()
        wire.put(EMPTY)
    assert received == [EMPTY]
    assert wire.most_readers == 1


async def test_read_ahead_stops_at_its_bytes() -> None:
    wire = Wire(*[part(b"x" * 10_000) for _ in range(20)], DISCONNECT)
    inflow = Counted(wire)
    async with anyio.create_task_group() as group:
        group.start_soon(inflow.read_ahead)
        await quiet()
        assert wire.calls == -(-READ_AHEAD_BYTES // 10_000)
        assert inflow.disconnects == 0, "a disconnect behind an unread upload is not seen yet"
        for _ in range(20):
            assert (await inflow.receive())["body"] == b"x" * 10_000
    assert inflow.disconnects == 1


async def test_read_ahead_stops_at_its_messages() -> None:
    wire = Wire(*[part(b"") for _ in range(200)])
    inflow = Counted(wire)
    async with anyio.create_task_group() as group:
        group.start_soon(inflow.read_ahead)
        await quiet(200)
        assert wire.calls == READ_AHEAD_MESSAGES
        await inflow.receive()
        await quiet()
        assert wire.calls == READ_AHEAD_MESSAGES + 1
        group.cancel_scope.cancel()


async def test_a_large_upload_passes_with_no_more_than_the_bound_in_memory() -> None:
    pieces = [bytes([i % 256]) * 30_000 for i in range(400)]
    wire = Wire(*[part(piece) for piece in pieces], part(b"", more=False), DISCONNECT)
    inflow = Counted(wire)
    most = 0
    body = []
    async with anyio.create_task_group() as group:
        group.start_soon(inflow.read_ahead)
        while (message := await inflow.receive())["more_body"]:
            body.append(message["body"])
            await quiet()
            most = max(most, (min(wire.calls, len(pieces)) - len(body)) * 30_000)
    assert body == pieces
    assert most <= READ_AHEAD_BYTES + 30_000
    assert inflow.disconnects == 1


async def test_the_disconnect_is_repeated_forever_and_reported_once() -> None:
    wire = Wire(DISCONNECT)
    inflow = Counted(wire)
    await inflow.read_ahead()
    assert [await inflow.receive() for _ in range(3)] == [DISCONNECT] * 3
    assert (wire.calls, inflow.disconnects) == (1, 1)
    await inflow.read_ahead()
    assert inflow.disconnects == 1


async def test_messages_before_the_disconnect_come_first() -> None:
    wire = Wire(part(b"a"), part(b"b"), DISCONNECT)
    inflow = Counted(wire)
    await inflow.read_ahead()
    assert inflow.disconnects == 1
    received = [await inflow.receive() for _ in range(4)]
    assert received == [part(b"a"), part(b"b"), DISCONNECT, DISCONNECT]


@pytest.mark.parametrize("watched", [False, True])
async def test_polling_for_the_disconnect_with_a_cancelled_scope(watched: bool) -> None:
    """What Starlette's `Request.is_disconnected` does."""
    wire = Wire()
    inflow = Counted(wire)

    async def poll() -> Message | None:
        with anyio.CancelScope() as scope:
            scope.cancel()
            return await inflow.receive()
        return None

    async with anyio.create_task_group() as group:
        if watched:
            group.start_soon(inflow.read_ahead)
        await quiet()
        for _ in range(3):
            assert await poll() is None
        wire.put(DISCONNECT)
        await quiet()
        if watched:
            assert await poll() == DISCONNECT
        group.cancel_scope.cancel()
    assert wire.most_readers == 1


async def test_what_receive_raises_in_the_watcher_reaches_the_apps_next_read_once() -> None:
    error = RuntimeError("the server is confused")
    wire = Wire(part(b"a"), error, part(b"b"))
    inflow = Counted(wire)
    await inflow.read_ahead()
    assert await inflow.receive() == part(b"a")
    with pytest.raises(RuntimeError) as caught:
        await inflow.receive()
    assert caught.value is error
    assert await inflow.receive() == part(b"b")
    assert inflow.disconnects == 0


async def test_what_receive_raises_wakes_an_app_that_waits_for_the_watcher() -> None:
    wire = Wire()
    inflow = Counted(wire)
    errors = []

    async def app() -> None:
        with pytest.raises(RuntimeError) as caught:
            await inflow.receive()
        errors.append(caught.value)

    async with anyio.create_task_group() as group:
        group.start_soon(inflow.read_ahead)
        await quiet()
        group.start_soon(app)
        await quiet()
        wire.put(RuntimeError("broken"))
    assert len(errors) == 1


async def test_two_readers_in_the_app_never_enter_receive_together() -> None:
    wire = Wire()
    inflow = Counted(wire)
    received: list[Message] = []

    async def app() -> None:
        received.append(await inflow.receive())

    async with anyio.create_task_group() as group:
        for _ in range(3):
            group.start_soon(app)
        group.start_soon(inflow.read_ahead)
        for body in (b"a", b"b", b"c"):
            await quiet()
            wire.put(part(body))
        await quiet()
        group.cancel_scope.cancel()
    assert sorted(message["body"] for message in received) == [b"a", b"b", b"c"]
    assert wire.most_readers == 1


async def test_websocket_messages_count_by_their_text_or_bytes() -> None:
    end: Message = {"type": "websocket.disconnect", "code": 1001}
    messages: list[Message] = [
        {"type": "websocket.connect"},
        {"type": "websocket.receive", "text": "x" * 40_000},
        {"type": "websocket.receive", "bytes": b"x" * 40_000, "text": None},
        {"type": "websocket.receive", "text": "late"},
        end,
    ]
    wire = Wire(*messages)
    inflow = Counted(wire)
    async with anyio.create_task_group() as group:
        group.start_soon(inflow.read_ahead)
        await quiet()
        assert wire.calls == 3
        assert [await inflow.receive() for _ in range(5)] == messages
    assert inflow.disconnects == 1
    assert await inflow.receive() == end


async def test_an_ignored_disconnect_is_passed_on_but_not_reported() -> None:
    wire = Wire(DISCONNECT)
    inflow = Counted(wire)
    inflow.ignore_disconnect()
    assert await inflow.receive() == DISCONNECT
    assert inflow.disconnects == 0


async def _cancel_when_blocked(scope: anyio.CancelScope) -> None:
    await quiet()
    scope.cancel()
