"""An httpx transport that streams an ASGI app's answer as it is sent, and can hang up.

httpx's own `ASGITransport` collects the whole answer first and reports the disconnect only after
it, so a client that leaves in the middle can't be tested with it.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel
import httpx

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from types import TracebackType

    from anyio.abc import TaskGroup
    from starlette.types import ASGIApp, Message, Scope


class DisconnectingASGITransport(httpx.AsyncBaseTransport):
    """`httpx.AsyncClient(transport=DisconnectingASGITransport(app))`, used as a context manager.

    Closing a response before its end (leaving `client.stream(...)`), or cancelling a request that
    waits for its response, is a client that hangs up: the app's `receive` yields `http.disconnect`
    at once, as it does under every real server, and the app is not cancelled.

    Leaving the client hangs up what is still open and waits for every app call to end. What an app
    raises comes out of the request, of reading the body, or, if the client had hung up, of leaving
    the client; `raise_app_exceptions=False` turns that off.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        raise_app_exceptions: bool = True,
        root_path: str = "",
        spec_version: str = "2.3",
    ) -> None:
        self.app = app
        self.raise_app_exceptions = raise_app_exceptions
        self.root_path = root_path
        self.spec_version = spec_version
        self._group: TaskGroup | None = None
        self._live: set[_Exchange] = set()
        self._failed: list[_Exchange] = []

    async def __aenter__(self) -> DisconnectingASGITransport:
        self._group = await anyio.create_task_group().__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        traceback: TracebackType | None = None,
    ) -> None:
        group, self._group = self._group, None
        if group is None:
            return
        for exchange in self._live:
            exchange.hang_up()
        if error is not None:
            group.cancel_scope.cancel()
        # Not given the error, which would come back in an exception group.
        await group.__aexit__(None, None, None)
        if error is None and self.raise_app_exceptions:
            for exchange in self._failed:
                if exchange.error is not None:
                    raise exchange.take_error()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Run the app for one request; returns as soon as it has sent its headers."""
        if self._group is None:
            raise RuntimeError("use the client as a context manager: its tasks need an owner")
        body = await request.aread()
        exchange = _Exchange(self.app, body)
        self._live.add(exchange)
        self._group.start_soon(self._run, exchange, self._scope(request))
        try:
            await exchange.started.wait()
        except BaseException:
            exchange.hang_up()
            raise
        if exchange.error is not None and self.raise_app_exceptions:
            raise exchange.take_error()
        return httpx.Response(
            exchange.status,
            headers=exchange.headers,
            stream=_Body(exchange, self.raise_app_exceptions),
        )

    async def _run(self, exchange: _Exchange, scope: Scope) -> None:
        try:
            await exchange.run(scope)
        finally:
            self._live.discard(exchange)
        if exchange.error is not None:
            self._failed.append(exchange)

    def _scope(self, request: httpx.Request) -> Scope:
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": self.spec_version},
            "http_version": "1.1",
            "method": request.method,
            "headers": [(k.lower(), v) for k, v in request.headers.raw],
            "scheme": request.url.scheme,
            "path": request.url.path,
            "raw_path": request.url.raw_path.split(b"?")[0],
            "query_string": request.url.query,
            "server": (request.url.host, request.url.port),
            "client": ("127.0.0.1", 1),
            "root_path": self.root_path,
            "state": {},
        }


class _Exchange:
    """One request and its response, between the client's task and the app's."""

    def __init__(self, app: ASGIApp, body: bytes) -> None:
        self._app = app
        self._body: bytes | None = body
        # No disconnect is reported while the connection is open; after the response it is, too.
        self._gone = anyio.Event()
        self._chunks: deque[bytes] = deque()
        self._more = anyio.Event()
        self._ended = False
        self.started = anyio.Event()
        self.status = 500
        self.headers: list[tuple[bytes, bytes]] = []
        self.error: Exception | None = None

    async def run(self, scope: Scope) -> None:
        try:
            await self._app(scope, self._receive, self._send)
        except Exception as error:
            self.error = error
        finally:
            self._end()
            self.started.set()

    def hang_up(self) -> None:
        """The client has gone. Means nothing once the response is complete."""
        self._gone.set()

    def take_error(self) -> Exception:
        error, self.error = self.error, None
        if error is None:
            raise RuntimeError("the app has raised nothing")
        return error

    async def next_chunk(self) -> bytes | None:
        """None after the last one."""
        while not self._chunks:
            if self._ended:
                return None
            self._more = anyio.Event()
            await self._more.wait()
        return self._chunks.popleft()

    async def _receive(self) -> Message:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        await anyio.lowlevel.checkpoint()
        if self._gone.is_set():
            return  # servers swallow what is sent to a closed connection
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = list(message.get("headers", []))
            self.started.set()
        elif message["type"] == "http.response.body":
            if message.get("body"):
                self._chunks.append(message["body"])
                self._more.set()
            if not message.get("more_body", False):
                self._end()

    def _end(self) -> None:
        self._ended = True
        self._gone.set()
        self._more.set()


class _Body(httpx.AsyncByteStream):
    """Not a generator: trio warns about one that a client leaves in the middle."""

    def __init__(self, exchange: _Exchange, raise_app_exceptions: bool) -> None:
        self._exchange = exchange
        self._raise = raise_app_exceptions

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        chunk = await self._exchange.next_chunk()
        if chunk is not None:
            return chunk
        if self._raise and self._exchange.error is not None:
            raise self._exchange.take_error()
        raise StopAsyncIteration

    async def aclose(self) -> None:
        self._exchange.hang_up()
