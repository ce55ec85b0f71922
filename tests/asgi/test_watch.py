"""The watch at message level: what it leaves alone, and what a disconnect does."""

from __future__ import annotations

import gc
import weakref
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread
import pytest

from qwen3_asgi.engine.binding import current_binding
from qwen3_asgi.errors import ClientDisconnected
from tests.asgi.staged import answer, served, watched
from tests.asgi.wire import DISCONNECT, EMPTY, END, START, Wire, chunk, http_scope, part
from tests.engine.engines import LONG, quiet, settle, tokens

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

    from tests.asgi.staged import Stage

pytestmark = pytest.mark.anyio

variable: ContextVar[str] = ContextVar("variable", default="unset")


async def test_a_request_without_a_generation_is_passed_through_call_for_call() -> None:
    messages = [part(b"a"), part(b"b", more=False), DISCONNECT]
    seen: dict[str, list[Any]] = {}

    def app(name: str) -> ASGIApp:
        async def run(scope: Scope, receive: Receive, send: Send) -> None:
            seen[name] = [await receive(), await receive()]
            await send(START)
            await send(chunk(b"x"))
            await send(END)
            seen[name].append(await receive())

        return run

    plain, wrapped = Wire(*messages), Wire(*messages)
    await app("plain")(http_scope(), plain.receive, plain.send)
    await watched(app("watched"))(http_scope(), wrapped.receive, wrapped.send)
    assert all(a is b for a, b in zip(seen["watched"], seen["plain"], strict=True))
    assert (wrapped.calls, wrapped.sent) == (plain.calls, plain.sent)


async def test_a_request_without_a_generation_starts_no_task_and_reads_nothing() -> None:
    wire = Wire(EMPTY)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        before = anyio.get_current_task().id
        await quiet()
        assert {task.id for task in anyio.get_running_tasks()} == running_before
        assert anyio.get_current_task().id == before
        await answer(send)

    running_before = {task.id for task in anyio.get_running_tasks()}
    await watched(app)(http_scope(), wire.receive, wire.send)
    assert wire.calls == 0


async def test_a_handler_in_a_transaction_runs_on_after_a_disconnect() -> None:
    wire = Wire(EMPTY, DISCONNECT)
    committed = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        assert await receive() == EMPTY
        assert await receive() == DISCONNECT
        await quiet()
        committed.append(True)
        await answer(send)

    await watched(app)(http_scope(), wire.receive, wire.send)
    assert committed == [True]


async def test_lifespan_and_unknown_scopes_are_passed_through() -> None:
    calls: list[tuple[Any, ...]] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        calls.append((scope, receive, send))

    wire = Wire()
    receive, send = wire.receive, wire.send
    for kind in ("lifespan", "mqtt"):
        scope = {"type": kind}
        await watched(app)(scope, receive, send)
        assert calls.pop() == (scope, receive, send)


async def test_context_variables_are_as_without_the_watch() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        assert variable.get() == "outside"
        variable.set("inside")

    wire = Wire()
    variable.set("outside")
    await watched(app)(http_scope(), wire.receive, wire.send)
    assert variable.get() == "inside", "the app runs in the caller's context, as it always did"
    assert current_binding.get() is None


async def test_a_request_leaves_no_reference_cycle() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await answer(send)

    wire = Wire(EMPTY)
    reference = weakref.ref(wire)
    gc.collect()
    gc.disable()
    try:
        await watched(app)(http_scope(), wire.receive, wire.send)
        del wire
        assert reference() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("spec_version", ["2.0", "2.3", "2.4", None])
async def test_a_waiting_generation_ends_with_client_disconnected(
    stage: Stage, spec_version: str | None
) -> None:
    wire = Wire(EMPTY)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await stage.generate()

    asgi = {"version": "3.0"} | ({} if spec_version is None else {"spec_version": spec_version})
    async with served(watched(app), wire, scope=http_scope(asgi=asgi)):
        await stage.gate.held(1)
        wire.put(DISCONNECT)
    assert isinstance(stage.notes[0], ClientDisconnected)
    assert stage.notes[1:] == ["cleaned up"]
    assert wire.most_readers == 1
    await stage.gone()


async def test_a_waiting_thread_ends_with_client_disconnected(stage: Stage) -> None:
    wire = Wire(EMPTY)

    def handler() -> None:
        try:
            stage.engine.generate_sync(prompt="hello", params=LONG)
        except ClientDisconnected as error:
            stage.notes.append(error)
            raise

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await anyio.to_thread.run_sync(handler)

    async with served(watched(app), wire):
        await stage.gate.held(1)
        wire.put(DISCONNECT)
    assert len(stage.notes) == 1
    await stage.gone()


async def test_a_stream_ends_with_client_disconnected_mid_way(stage: Stage) -> None:
    wire = Wire(EMPTY)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(START)
        try:
            async for delta in stage.engine.stream(prompt="hello", params=LONG):
                await send(chunk(delta.text.encode()))
        except ClientDisconnected:
            stage.notes.append("told")
            raise

    stage.gate.allow(3)
    async with served(watched(app), wire):
        await stage.gate.held(4)
        wire.put(DISCONNECT)
    assert stage.notes == ["told"]
    assert "http.response.start" in wire.sent_types
    await stage.gone(steps=4)


async def test_the_host_sees_a_499_when_nothing_was_sent_and_no_end_otherwise(
    stage: Stage,
) -> None:
    """Middleware that insists on a response (Starlette's `BaseHTTPMiddleware`) is content."""

    async def silent(scope: Scope, receive: Receive, send: Send) -> None:
        await stage.generate()

    async def started(scope: Scope, receive: Receive, send: Send) -> None:
        await send(START)
        await stage.generate()

    for step, (app, types) in enumerate(
        [
            (silent, ["http.response.start", "http.response.body"]),
            # An empty part, for compressing middleware that holds the start back until then.
            (started, ["http.response.start", "http.response.body"]),
        ],
        start=1,
    ):
        wire = Wire(EMPTY)
        async with served(watched(app), wire):
            await stage.gate.held(step)
            wire.put(DISCONNECT)
        assert wire.sent_types == types
        assert wire.sent[1] == {**END, "more_body": True}
        assert wire.sent[0]["status"] == (499 if app is silent else 200)
        await stage.gone(steps=step)
        stage.gate.hold()


async def test_an_app_that_never_reads_its_body_is_watched(stage: Stage) -> None:
    wire = Wire()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await stage.generate()

    async with served(watched(app), wire):
        await stage.gate.held(1)
        wire.put(EMPTY, DISCONNECT)
    assert stage.notes[-1] == "cleaned up"
    await stage.gone()


async def test_an_app_that_reads_itself_still_gets_every_message(stage: Stage) -> None:
    wire = Wire()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(listen, receive)
            with pytest.raises(ClientDisconnected):
                await stage.generate()

    async def listen(receive: Receive) -> None:
        stage.notes.extend([await receive() for _ in range(3)])

    async with served(watched(app), wire):
        await stage.gate.held(1)
        wire.put(part(b"a"), part(b"b"), DISCONNECT)
    assert [note for note in stage.notes if isinstance(note, dict)] == [
        part(b"a"),
        part(b"b"),
        DISCONNECT,
    ]
    assert wire.most_readers == 1
    await stage.gone()


async def test_generations_in_child_tasks_and_threads_are_all_cancelled(stage: Stage) -> None:
    wire = Wire(EMPTY)

    def in_thread() -> None:
        stage.engine.generate_sync(prompt="thread", params=LONG)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        async with anyio.create_task_group() as group:
            for _ in range(4):
                group.start_soon(stage.generate)
            group.start_soon(anyio.to_thread.run_sync, in_thread)

    async with served(watched(app), wire):
        await stage.gate.held(1)
        stage.gate.allow(1)
        await stage.gate.held(2)
        await stage.live(5)
        wire.put(DISCONNECT)
    # The group of nothing but ClientDisconnected is swallowed as one alone would be.
    await stage.gone(steps=2)
    assert stage.notes.count("cleaned up") == 4


async def test_a_generation_started_after_the_disconnect_raises_at_once(stage: Stage) -> None:
    wire = Wire(EMPTY, DISCONNECT)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        for _ in range(2):
            with pytest.raises(ClientDisconnected):
                await stage.engine.generate(prompt="hello", params=LONG)

    async with served(watched(app), wire):
        pass
    assert stage.fake.plans == 0
    await settle(stage.engine)


async def test_a_disconnect_after_the_response_cancels_nothing(stage: Stage) -> None:
    """A background task with a generation of its own runs on; servers report a disconnect then."""
    wire = Wire(EMPTY)
    stage.gate.open()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await stage.engine.generate(prompt="hello", params=tokens(2))
        await answer(send)
        wire.put(DISCONNECT)
        await quiet()
        output = await stage.engine.generate(prompt="background", params=tokens(50))
        assert [await receive(), await receive()] == [EMPTY, DISCONNECT]
        later = await stage.engine.generate(prompt="later", params=tokens(5))
        stage.notes.append((len(output.token_ids), len(later.token_ids)))

    async with served(watched(app), wire):
        pass
    assert stage.notes == [(50, 5)]


async def test_a_handle_left_open_by_the_response_runs_on_in_the_background(stage: Stage) -> None:
    wire = Wire(EMPTY)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        handle = await stage.engine.submit(prompt="hello", params=tokens(30))
        await answer(send)
        wire.put(DISCONNECT)
        await quiet()
        stage.gate.open()
        stage.notes.append(len([t async for batch in handle for t in batch.tokens]))

    async with served(watched(app), wire):
        pass
    assert stage.notes == [30]


async def test_a_send_that_fails_is_a_disconnect(stage: Stage) -> None:
    wire = Wire(EMPTY)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        handle = await stage.engine.submit(prompt="hello", params=LONG)
        await stage.gate.held(1)
        wire.send_error = OSError("connection lost")
        with pytest.raises(OSError, match="connection lost"):
            await send(START)
        with pytest.raises(ClientDisconnected):
            await anext(handle)

    async with served(watched(app), wire):
        pass
    await stage.gone()


async def test_a_server_whose_receive_fails_does_not_end_the_generation(stage: Stage) -> None:
    """The app meets the error when it reads, as it would without the watch."""
    wire = Wire(EMPTY, RuntimeError("confused"))
    stage.gate.open()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        output = await stage.engine.generate(prompt="hello", params=tokens(40))
        stage.notes.append(len(output.token_ids))
        assert await receive() == EMPTY
        with pytest.raises(RuntimeError, match="confused"):
            await receive()

    async with served(watched(app), wire):
        pass
    assert stage.notes == [40]
