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
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

# What a disconnect cancels: the request's generations, or its whole app task as well.
CancelPolicy = Literal["generations", "request"] | Callable[["Scope"], bool]

WATCH_KEY = "qwen3_asgi.watch"
# What proxies log for a client that closed its request.
GONE_STATUS = 499
GOING_AWAY = 1001
# `websocket.http.*`: a refusal with a response of its own.
_FIRST_MESSAGES = ("http.response.start", "websocket.accept", "websocket.http.response.start")
_BODY_MESSAGES = ("http.response.body", "websocket.http.response.body")
_FINAL_MESSAGES = ("http.response.pathsend", "websocket.close")
# Never the last message to a client that is gone: hypercorn's `send` waits for ever for a lost
# HTTP/2 connection to take that one.
_EMPTY_PART: Message = {"type": "http.response.body", "body": b"", "more_body": True}


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

    __slots__ = (
        "_app_scopes",
        "_binding",
        "_complete",
        "_inflow",
        "_last_sent",
        "_portal",
        "_response_started",
        "_send",
        "_watcher",
    )

    def __init__(self, receive: Receive, send: Send) -> None:
        self._inflow = Inflow(receive, self._on_disconnect)
        self._send = send
        self._binding = RequestBinding(self._start_from_anywhere)
        self._portal = LoopPortal.current()
        self._watcher: _Watcher | None = None
        self._app_scopes: list[anyio.CancelScope] = []
        self._response_started = False
        self._last_sent = ""
        self._complete = False

    async def run(self, app: ASGIApp, scope: Scope, *, cancel_app: bool) -> None:
        # In the scope itself and not in a copy: what the host's router notes in there (`route`,
        # `endpoint`) is read by middleware outside of ours.
        scope[WATCH_KEY] = self
        token = current_binding.set(self._binding)
        try:
            ended = await self._run_app(app, scope, self._inflow.receive, self.send, cancel_app)
        finally:
            self._stop()
            if self._watcher is not None:
                await self._watcher.ended()
            current_binding.reset(token)
            scope.pop(WATCH_KEY, None)  # or it would refer to itself through `receive`
        if not ended:
            await _answer_gone(scope, self._send, self._last_sent)

    async def run_nested(
        self, app: ASGIApp, scope: Scope, receive: Receive, send: Send, *, cancel_app: bool
    ) -> None:
        """An inner `DisconnectWatch` of the same request."""
        last = ""

        async def send_noting(message: Message) -> None:
            nonlocal last
            await send(message)
            last = message["type"]  # not before: a `send` that is cancelled may have sent nothing

        if not await self._run_app(app, scope, receive, send_noting, cancel_app):
            await _answer_gone(scope, send, last)

    async def send(self, message: Message) -> None:
        kind = message["type"]
        if kind in _FIRST_MESSAGES:
            self._response_started = True
        elif kind in _FINAL_MESSAGES or (
            kind in _BODY_MESSAGES and not message.get("more_body", False)
        ):
            # Before the server sees it: from here on every server reports a disconnect that means
            # nothing, and background tasks must run on.
            self._stop()
        try:
            await self._send(message)
            self._last_sent = kind
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
            self._portal.call_soon(self._start)
        except LoopClosed:
            return  # the request is over with its loop

    def _start(self) -> None:
        if self._watcher is None and not self._complete:
            self._watcher = _Watcher(self._inflow, self._portal)

    def _stop(self) -> None:
        self._complete = True
        self._binding.release()
        self._inflow.ignore_disconnect()
        if self._watcher is not None:
            self._watcher.stop()


class _Watcher:
    """The task that reads `receive` beside the app.

    Not in a task group: every request would have to open one for the few that generate, and it
    would wrap the app's exceptions.
    """

    __slots__ = ("_ended", "_inflow", "_scope", "_stopped", "_task", "_waiter")

    def __init__(self, inflow: Inflow, portal: LoopPortal) -> None:
        self._inflow = inflow
        self._scope: anyio.CancelScope | None = None
        self._stopped = False
        self._ended = False
        self._waiter: anyio.Event | None = None
        self._task = portal.spawn(self._run)

    def stop(self) -> None:
        self._stopped = True
        if self._scope is not None:
            self._scope.cancel()

    async def ended(self) -> None:
        """Wait until it has let go of `receive`, after `stop`.

        Not to be cancelled: that must not replace what the app has returned or raised.
        """
        if self._ended:
            return
        self._waiter = anyio.Event()
        with anyio.CancelScope(shield=True):  # on asyncio no shield against a plain `Task.cancel`
            while not self._ended:
                with contextlib.suppress(anyio.get_cancelled_exc_class()):
                    await self._waiter.wait()

    async def _run(self) -> None:
        try:
            if not self._stopped:
                with anyio.CancelScope() as self._scope:
                    await self._inflow.read_ahead()
        finally:
            self._ended = True
            if self._waiter is not None:
                self._waiter.set()


async def _answer_gone(scope: Scope, send: Send, last_sent: str) -> None:
    """Nobody reads this, but a server or the host's middleware outside may insist on an answer."""
    with contextlib.suppress(OSError):
        if scope["type"] == "websocket":
            if not last_sent:
                await send({"type": "websocket.close", "code": GOING_AWAY})
            return
        if not last_sent:
            await send({"type": "http.response.start", "status": GONE_STATUS, "headers": []})
        if last_sent in ("", "http.response.start"):
            # Compressing middleware holds the start back until there is a body.
            await send(_EMPTY_PART)
