"""The watch at message level: exceptions and cancellations come out as without it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from qwen3_asgi.errors import ClientDisconnected
from tests.asgi.staged import served, watched
from tests.asgi.wire import DISCONNECT, EMPTY, Wire, http_scope
from tests.engine.engines import quiet, tokens

if TYPE_CHECKING:
    from starlette.types import Message, Receive, Scope, Send

    from qwen3_asgi.asgi.watch import CancelPolicy
    from tests.asgi.staged import Stage

pytestmark = pytest.mark.anyio


class Boom(Exception):
    pass


async def test_client_disconnected_raised_while_the_client_is_there_is_not_swallowed() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise ClientDisconnected("by mistake")

    wire = Wire()
    with pytest.raises(ClientDisconnected, match="by mistake"):
        await watched(app)(http_scope(), wire.receive, wire.send)


@pytest.mark.parametrize("kind", [Boom, KeyboardInterrupt, SystemExit, ExceptionGroup])
@pytest.mark.parametrize("touches_engine", [False, True])
@pytest.mark.parametrize("cancel", ["generations", "request"])
async def test_exceptions_come_out_as_they_were_raised(
    stage: Stage, kind: type[BaseException], touches_engine: bool, cancel: CancelPolicy
) -> None:
    error = kind("boom", [Boom()]) if kind is ExceptionGroup else kind("boom")
    wire = Wire(EMPTY)
    stage.gate.open()

    async def handler_of_the_host() -> None:
        raise error

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if touches_engine:
            await stage.engine.generate(prompt="hello", params=tokens(1))
        await handler_of_the_host()

    caught: BaseException | None = None
    try:
        await watched(app, cancel)(http_scope(), wire.receive, wire.send)
    except BaseException as raised:
        caught = raised
    assert caught is error
    assert (error.__cause__, error.__context__) == (None, None)
    frames = []
    traceback = error.__traceback__
    while traceback is not None:
        frames.append(traceback.tb_frame.f_code.co_name)
        traceback = traceback.tb_next
    assert frames[-1] == "handler_of_the_host"


async def test_an_error_of_the_clean_up_after_a_disconnect_is_not_swallowed(stage: Stage) -> None:
    wire = Wire(EMPTY)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await stage.generate()
        except ClientDisconnected as error:
            raise Boom from error

    async def serve() -> None:
        async with served(watched(app), wire):
            await stage.gate.held(1)
            wire.put(DISCONNECT)

    with pytest.raises(Boom):
        await serve()
    await stage.gone()


async def test_a_mixed_group_is_not_swallowed(stage: Stage) -> None:
    wire = Wire(EMPTY)

    async def fail() -> None:
        try:
            await stage.generate()
        finally:
            raise Boom

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(stage.generate)
            group.start_soon(fail)

    async def serve() -> None:
        async with served(watched(app), wire):
            await stage.gate.held(1)
            await stage.live(2)
            wire.put(DISCONNECT)

    with pytest.raises(ExceptionGroup) as caught:
        await serve()
    assert caught.group_contains(Boom)


@pytest.mark.parametrize("cancel", ["generations", "request"])
async def test_the_hosts_own_cancellation_passes_and_cancels_the_generation(
    stage: Stage, cancel: CancelPolicy
) -> None:
    wire = Wire(EMPTY)
    cancelled = anyio.get_cancelled_exc_class()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await stage.generate()

    async with anyio.create_task_group() as group:

        async def serve() -> None:
            try:
                await watched(app, cancel)(http_scope(), wire.receive, wire.send)
            except cancelled:
                stage.notes.append("cancelled")
                raise

        group.start_soon(serve)
        await stage.gate.held(1)
        group.cancel_scope.cancel()
    assert stage.notes == ["cleaned up", "cancelled"]
    assert wire.sent == []
    await stage.gone()


async def test_an_error_raised_during_the_hosts_cancellation_is_not_replaced(
    stage: Stage,
) -> None:
    wire = Wire(EMPTY)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await stage.generate()
        finally:
            raise Boom

    async with anyio.create_task_group() as group:

        async def serve() -> None:
            with pytest.raises(Boom):
                await watched(app)(http_scope(), wire.receive, wire.send)
            stage.notes.append("boom")

        group.start_soon(serve)
        await stage.gate.held(1)
        group.cancel_scope.cancel()
    assert stage.notes == ["cleaned up", "boom"]
    await stage.gone()


async def test_a_bare_cancelled_error_of_the_app_passes_as_it_is(anyio_backend_name: str) -> None:
    """Not the host's cancellation: the handler awaited an asyncio task that somebody cancelled."""
    if anyio_backend_name != "asyncio":
        pytest.skip("trio has no such thing")
    error = asyncio.CancelledError("a task's")

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise error

    wire = Wire()
    policies: tuple[CancelPolicy, ...] = ("generations", "request")
    for policy in policies:
        with pytest.raises(asyncio.CancelledError) as caught:
            await watched(app, policy)(http_scope(), wire.receive, wire.send)
        assert caught.value is error
    await quiet()
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


async def test_a_native_cancellation_of_the_servers_task_passes(
    stage: Stage, anyio_backend_name: str
) -> None:
    if anyio_backend_name != "asyncio":
        pytest.skip("trio has no such thing")
    wire = Wire(EMPTY)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await stage.generate()

    task = asyncio.ensure_future(watched(app)(http_scope(), wire.receive, wire.send))
    await stage.gate.held(1)
    task.cancel("the server shuts down")
    with pytest.raises(asyncio.CancelledError, match="the server shuts down"):
        await task
    assert stage.notes == ["cleaned up"]
    await stage.gone()


async def test_a_cancellation_while_the_watcher_lets_go_replaces_nothing(
    stage: Stage, anyio_backend_name: str
) -> None:
    """The server's `receive` takes its time to end; the app has raised by then."""
    stage.gate.open()
    wire = Wire(EMPTY)
    inside, raising, let_go = anyio.Event(), anyio.Event(), anyio.Event()

    async def receive() -> Message:
        if wire.unread:
            return await wire.receive()
        try:
            inside.set()
            await anyio.sleep_forever()
        finally:
            with anyio.CancelScope(shield=True):
                await let_go.wait()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await stage.engine.generate(prompt="hello", params=tokens(1))
        await inside.wait()
        raising.set()
        raise Boom

    raised: list[BaseException] = []
    scope = anyio.CancelScope()
    tasks: list[asyncio.Task[Any]] = []

    async def serve() -> None:
        if anyio_backend_name == "asyncio":
            tasks.append(asyncio.current_task())
        with scope:
            try:
                await watched(app)(http_scope(), receive, wire.send)
            except BaseException as error:
                raised.append(error)

    async with anyio.create_task_group() as group:
        group.start_soon(serve)
        await raising.wait()
        await quiet()
        for cancel in (scope, *tasks):
            cancel.cancel()
            await quiet()
        assert not raised, "the server's receive still has a reader"
        let_go.set()
    assert [type(error) for error in raised] == [Boom]
