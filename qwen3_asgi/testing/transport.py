"""An httpx transport that streams an ASGI app's answer as it is sent, and can hang up.

httpx's own `ASGITransport` collects the whole answer first and reports the disconnect only after
it, so a client that leaves in the middle can't be tested with it.
"""

from __future__ import annotations

import math
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

    async def __aenter__(self) -> DisconnectingASGITransport:
        self._group = await anyio.create_task_group().__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        traceback: TracebackType | None = None,
    ) -> None:
        if self._group is not None:
            await self._group.__aexit__(kind, error, traceback)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Run the app for one request; returns as soon as it has sent its headers."""
        if self._group is None:
            raise RuntimeError("use the client as a context manager: its tasks need an owner")
        body = await request.aread()
        exchange = _Exchange(self.app, body, self.raise_app_exceptions)
        self._group.start_soon(exchange.run, self._scope(request))
        try:
            await exchange.started.wait()
        except BaseException:
            exchange.hang_up()
            raise
        if exchange.error is not None and self.raise_app_exceptions:
            raise exchange.error
        return httpx.Response(exchange.status, headers=exchange.headers, stream=_Body(exchange))

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

    def __init__(self, app: ASGIApp, body: bytes, raise_app_exceptions: bool) -> None:
        self._app = app
        self._body: bytes | None = body
        self._raise = raise_app_exceptions
        self._gone = anyio.Event()
        self.started = anyio.Event()
        self.status = 500
        self.headers: list[tuple[bytes, bytes]] = []
        self.error: Exception | None = None
        self._chunks_in, self.chunks = anyio.create_memory_object_stream[bytes](math.inf)
        self._complete = False

    async def run(self, scope: Scope) -> None:
        try:
            await self._app(scope, self._receive, self._send)
        except Exception as error:
            self.error = error
        finally:
            self._gone.set()
            self.started.set()
            self._chunks_in.close()

    def hang_up(self) -> None:
        """The client has gone."""
        self._gone.set()

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
                self._chunks_in.send_nowait(message["body"])
            if not message.get("more_body", False):
                self._complete = True
                self._gone.set()
                self._chunks_in.close()


class _Body(httpx.AsyncByteStream):
    def __init__(self, exchange: _Exchange) -> None:
        self._exchange = exchange

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for chunk in self._exchange.chunks:
            yield chunk

    async def aclose(self) -> None:
        self._exchange.hang_up()
        self._exchange.chunks.close()
