"""Random ASGI apps and servers, and everything that can be seen of one serving the other.

A program is a list of steps; `observe` runs it under a scripted server and returns a trace that two
runs, with something around the app and without, can be compared by.
"""

from __future__ import annotations

import asyncio
import traceback
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel
import anyio.to_thread
from hypothesis import strategies as st

from tests.asgi.wire import DISCONNECT, END, START, Wire, chunk, http_scope, part
from tests.engine.engines import GUARD_SECONDS

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

variable: ContextVar[int] = ContextVar("variable", default=0)

STEPS = (
    "receive",
    "receive in a child task",
    "poll",
    "start",
    "chunk",
    "end",
    "other message",
    "checkpoint",
    "thread",
    "set variable",
    "change scope",
    "cancelled block",
    "raise",
    "raise from",
    "raise a group",
    "raise a BaseException",
)
HEADS: dict[str, list[Message]] = {
    "http": [],
    "websocket": [{"type": "websocket.connect"}],
}
ENDS: dict[str, Message] = {
    "http": DISCONNECT,
    "websocket": {"type": "websocket.disconnect", "code": 1001},
}


class Boom(Exception):
    pass


class Stop(BaseException):
    pass


@dataclass(frozen=True)
class Case:
    """One app, one server, one connection."""

    kind: str
    steps: tuple[str, ...]
    # Whether the app goes on after an error of `receive` or `send`.
    guarded: bool
    # Bodies of the incoming messages, or None for a `receive` that fails.
    incoming: tuple[bytes | None, ...]
    # From this message on, `send` fails.
    send_fails_at: int | None
    # Whether the server's task is cancelled before the app is called.
    cancelled: bool


cases = st.builds(
    Case,
    kind=st.sampled_from(("http", "http", "websocket")),
    steps=st.lists(st.sampled_from(STEPS), max_size=10).map(tuple),
    guarded=st.booleans(),
    incoming=st.lists(st.none() | st.binary(max_size=3), max_size=3).map(tuple),
    send_fails_at=st.none() | st.integers(0, 3),
    cancelled=st.sampled_from((False, False, False, True)),
)


class Server:
    """Hands out its messages, then the disconnect for ever, and notes each call."""

    def __init__(self, case: Case, trace: list[Any]) -> None:
        bodies = [self._incoming(case, body) for body in case.incoming]
        self._wire = Wire(*HEADS[case.kind], *bodies, ENDS[case.kind])
        self._fails_at = case.send_fails_at
        self._trace = trace

    async def receive(self) -> Message:
        self._trace.append("server: receive")
        return await self._wire.receive()

    async def send(self, message: Message) -> None:
        self._trace.append(("server: send", message))
        if self._fails_at is not None and len(self._wire.sent) >= self._fails_at:
            raise OSError("the server says that the connection is lost")
        await self._wire.send(message)

    def _incoming(self, case: Case, body: bytes | None) -> Message | Exception:
        if body is None:
            return RuntimeError("the server's receive failed")
        return part(body) if case.kind == "http" else {"type": "websocket.receive", "bytes": body}


class Program:
    """The app of a case."""

    def __init__(self, case: Case, trace: list[Any]) -> None:
        self._case = case
        self._trace = trace

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._trace.append(("app: task", anyio.get_current_task().id))
        for number, step in enumerate(self._case.steps):
            try:
                await self._step(step, number, scope, receive, send)
            except (OSError, RuntimeError) as error:
                self._trace.append(("app: error", repr(error)))
                if not self._case.guarded:
                    raise

    async def _step(
        self, step: str, number: int, scope: Scope, receive: Receive, send: Send
    ) -> None:
        match step:
            case "receive":
                self._trace.append(("app: received", await receive()))
            case "receive in a child task":
                await self._receive_in_child(receive)
            case "poll":  # as Starlette's `Request.is_disconnected`
                with anyio.CancelScope() as polling:
                    polling.cancel()
                    self._trace.append(("app: received", await receive()))
            case "start" | "chunk" | "end" | "other message":
                await send(self._outgoing(step))
            case "checkpoint":
                await anyio.lowlevel.checkpoint()
            case "thread":
                seen = await anyio.to_thread.run_sync(variable.get)
                self._trace.append(("app: thread saw", seen))
            case "set variable":
                variable.set(number + 1)
            case "change scope":
                scope["noted"] = number
            case "cancelled block":
                with anyio.CancelScope() as block:
                    block.cancel()
                    await anyio.lowlevel.checkpoint()
                self._trace.append(("app: cancelled", block.cancelled_caught))
            case "raise":
                raise Boom(number)
            case "raise from":
                try:
                    raise KeyError(number)
                except KeyError as cause:
                    cause.add_note("a note")
                    raise Boom(number) from cause
            case "raise a group":
                raise ExceptionGroup("several", [Boom(number), ValueError()])
            case "raise a BaseException":
                raise Stop(number)

    async def _receive_in_child(self, receive: Receive) -> None:
        errors: list[Exception] = []

        async def child() -> None:
            try:
                self._trace.append(("app: child received", await receive()))
            except RuntimeError as error:
                errors.append(error)

        async with anyio.create_task_group() as group:
            group.start_soon(child)
        for error in errors:
            raise error

    def _outgoing(self, step: str) -> Message:
        http: dict[str, Message] = {
            "start": START,
            "chunk": chunk(b"x"),
            "end": END,
            "other message": {"type": "http.response.early_hint", "links": []},
        }
        websocket: dict[str, Message] = {
            "start": {"type": "websocket.accept"},
            "chunk": {"type": "websocket.send", "text": "x"},
            "end": {"type": "websocket.close", "code": 1000},
            "other message": {"type": "websocket.http.response.start", "status": 403},
        }
        return (http if self._case.kind == "http" else websocket)[step]


async def observe(case: Case, wrap: Callable[[ASGIApp], ASGIApp]) -> list[Any]:
    """Serve one connection and tell everything that the app and the server could notice."""
    trace: list[Any] = []
    server = Server(case, trace)
    app = wrap(Program(case, trace))
    asyncio_task = asyncio.current_task() if _on_asyncio() else None
    scope = http_scope() if case.kind == "http" else {"type": "websocket", "path": "/"}
    variable.set(0)
    task = anyio.get_current_task().id
    tasks = {other.id for other in anyio.get_running_tasks()}
    with anyio.fail_after(GUARD_SECONDS), anyio.CancelScope() as host:
        if case.cancelled:
            host.cancel()
        try:
            await app(scope, server.receive, server.send)
            trace.append("outcome: returned")
        except anyio.get_cancelled_exc_class():
            trace.append("outcome: cancelled")
            raise
        except BaseException as error:
            trace.append(("outcome: raised", *_described(error)))
    trace.append(("host was cancelled", host.cancelled_caught))
    trace.append(("variable", variable.get()))
    trace.append(("scope", sorted(scope), scope.get("noted")))
    trace.append(("same task", anyio.get_current_task().id == task))
    left = {other.id for other in anyio.get_running_tasks()} - tasks
    trace.append(("tasks left", len(left)))
    if asyncio_task is not None:
        trace.append(("cancelling", asyncio_task.cancelling()))
    return trace


def _described(error: BaseException) -> tuple[Any, ...]:
    """Type and text, where it was raised, and everything chained to it."""
    raised_in = traceback.extract_tb(error.__traceback__)[-1]
    return (
        repr(error),
        (raised_in.filename, raised_in.lineno, raised_in.line),
        getattr(error, "__notes__", None),
        error.__suppress_context__,
        None if error.__cause__ is None else _described(error.__cause__),
        None if error.__context__ is None else _described(error.__context__),
    )


def _on_asyncio() -> bool:
    try:
        return asyncio.get_running_loop() is not None
    except RuntimeError:
        return False
