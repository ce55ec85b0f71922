"""Notices through `receive` that the client has gone, and cancels what it started.

Wraps a whole app (pure ASGI). A request that never touches the engine runs as if this were not
here: messages pass straight through. The first generation of a request starts a watcher task that
reads `receive` beside the app and hands everything on in order.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import anyio

from qwen3_asgi.asgi.inflow import Inflow
from qwen3_asgi.engine.binding import RequestBinding, current_binding
from qwen3_asgi.engine.portal import LoopClosed, LoopPortal
from qwen3_asgi.errors import ClientDisconnected

if TYPE_CHECKING:
    from anyio.abc import TaskGroup
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

# What a disconnect cancels: the request's generations, or its whole app task as well.
CancelPolicy = Literal["generations", "request"] | Callable[["Scope"], bool]

WATCH_KEY = "qwen3_asgi.watch"
# What proxies log for a client that closed its request.
GONE_STATUS = 499
_FINAL_MESSAGES = ("http.response.pathsend", "websocket.close")


class DisconnectWatch:
    """ASGI middleware. Nested in itself it watches once: the inner one joins the outer one.

    Args:
        app: the ASGI app to watch.
        cancel: "generations" cancels the generations of a request whose client went, and the
            handler that waits for one gets `ClientDisconnected`. "request" cancels the app's task
            as well. A callable on the scope chooses per request (true means "request").
    """

    def __init__(self, app: ASGIApp, *, cancel: CancelPolicy = "generations") -> None:
        if not callable(cancel) and cancel not in ("generations", "request"):
            raise ValueError(
                f"cancel must be 'generations', 'request' or a callable, got {cancel!r}"
            )
        self.app = app
        self.cancel = cancel

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
            return
        cancel_app = self.cancel(scope) if callable(self.cancel) else self.cancel == "request"
        outer = scope.get(WATCH_KEY)
        if isinstance(outer, _Watch):
            await outer.run_nested(self.app, scope, receive, send, cancel_app=cancel_app)
        else:
            await _Watch(receive, send).run(self.app, scope, cancel_app=cancel_app)


class _Watch:
    """One request. Lives in its event loop; only `_start_from_anywhere` is called from threads."""

    def __init__(self, receive: Receive, send: Send) -> None:
        self._inflow = Inflow(receive, self._on_disconnect)
        self._send = send
        self._binding = RequestBinding(self._start_from_anywhere)
        self._portal = LoopPortal.current()
        self._group: TaskGroup | None = None
        self._started = False
        self._watcher: anyio.CancelScope | None = None
        self._app_scopes: list[anyio.CancelScope] = []
        self._response_started = False
        self._complete = False

    async def run(self, app: ASGIApp, scope: Scope, *, cancel_app: bool) -> None:
        scope = {**scope, WATCH_KEY: self}
        token = current_binding.set(self._binding)
        error: BaseException | None = None
        ended = False
        try:
            async with anyio.create_task_group() as self._group:
                try:
                    ended = await self._run_app(
                        app, scope, self._inflow.receive, self.send, cancel_app
                    )
                except anyio.get_cancelled_exc_class():
                    raise  # the host's own cancellation, the task group must see it
                except BaseException as raised:
                    error = raised  # past the task group, which would wrap it in a group
                finally:
                    self._stop()
                # Only the watcher is left, and it is ending: a cancellation that comes now must
                # not replace what the app has returned or raised.
                self._group.cancel_scope.shield = True
        finally:
            current_binding.reset(token)
        try:
            if error is not None:
                raise error
        finally:
            error = None  # a frame that refers to its own traceback is a reference cycle
        if not ended and not self._response_started:
            await _answer_gone(scope, self._send)

    async def run_nested(
        self, app: ASGIApp, scope: Scope, receive: Receive, send: Send, *, cancel_app: bool
    ) -> None:
        """An inner `DisconnectWatch` of the same request."""
        started = False

        async def send_noting(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        if not await self._run_app(app, scope, receive, send_noting, cancel_app) and not started:
            await _answer_gone(scope, send)

    async def send(self, message: Message) -> None:
        kind = message["type"]
        if kind == "http.response.start":
            self._response_started = True
        elif kind in _FINAL_MESSAGES or (
            kind == "http.response.body" and not message.get("more_body", False)
        ):
            # Before the server sees it: from here on every server reports a disconnect that means
            # nothing, and background tasks must run on.
            self._stop()
        elif kind == "websocket.accept":
            self._response_started = True
        try:
            await self._send(message)
        except OSError:  # spec 2.4: a server may say so here, too
            self._on_disconnect()
            raise

    async def _run_app(
        self, app: ASGIApp, scope: Scope, receive: Receive, send: Send, cancel_app: bool
    ) -> bool:
        """Returns whether the app came to its end; false if the disconnect ended it."""
        try:
            if not cancel_app:
                await app(scope, receive, send)
                return True
            with anyio.CancelScope() as app_scope:
                self._app_scopes.append(app_scope)
                self._start()
                if self._binding.disconnected:
                    app_scope.cancel()
                await app(scope, receive, send)
            return not app_scope.cancelled_caught
        except BaseException as error:
            if self._is_ours(error):
                return False
            raise

    def _is_ours(self, error: BaseException) -> bool:
        if not self._binding.disconnected:
            return False
        if isinstance(error, BaseExceptionGroup):  # the app's own task group, with one in each task
            return error.split(ClientDisconnected)[1] is None
        return isinstance(error, ClientDisconnected)

    def _on_disconnect(self) -> None:
        if self._complete:
            return
        self._binding.disconnect("streaming" if self._response_started else "before_response")
        for app_scope in self._app_scopes:
            app_scope.cancel()

    def _start_from_anywhere(self) -> None:
        if self._portal.is_here:
            self._start()
            return
        try:
            self._portal.call_soon_in_task(self._start)
        except LoopClosed:
            return  # the request is over with its loop

    def _start(self) -> None:
        if not self._started and self._group is not None and not self._complete:
            self._started = True
            self._group.start_soon(self._watch)

    async def _watch(self) -> None:
        if not self._complete:
            with anyio.CancelScope() as self._watcher:
                await self._inflow.read_ahead()

    def _stop(self) -> None:
        self._complete = True
        self._binding.release()
        self._inflow.ignore_disconnect()
        if self._watcher is not None:
            self._watcher.cancel()


async def _answer_gone(scope: Scope, send: Send) -> None:
    """Nobody reads this, but the host's middleware outside may insist on a response."""
    if scope["type"] != "http":
        return
    with contextlib.suppress(OSError):
        await send({"type": "http.response.start", "status": GONE_STATUS, "headers": []})
        await send({"type": "http.response.body", "body": b""})
