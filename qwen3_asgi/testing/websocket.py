"""A client of an app's WebSocket endpoint, without a server: connect, talk, and leave."""

from __future__ import annotations

import json
from collections import deque
from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel
import httpx

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import TracebackType

    from anyio.abc import TaskGroup
    from starlette.types import ASGIApp, Message, Scope


class WebSocketClosed(Exception):
    """The app has closed the connection, or has not accepted it (`code` is 1006 then if it gave
    none, as a browser reports a refused handshake)."""

    def __init__(self, code: int, reason: str = "") -> None:
        super().__init__(f"the app closed the WebSocket with code {code} {reason}".rstrip())
        self.code = code
        self.reason = reason


class WebSocketSession:
    """`async with WebSocketSession(app, "/ws") as ws:` is a connection that the app has accepted.

    Leaving the block disconnects (so does `disconnect`, with a code), waits for the app to return,
    and raises what it has raised. The app is not cancelled. An app that sends faster than the test
    reads is not held back.

    Args:
        app: what to connect to.
        url: path and query, or a whole URL.
        headers, subprotocols: the handshake's.
        root_path: the scope's.
        raise_on_send: let the app's `send` raise `OSError` after a disconnect (as uvicorn does)
            instead of swallowing.

    Raises:
        WebSocketClosed: on entering, the app refused; on `receive`, it has closed.
    """

    def __init__(
        self,
        app: ASGIApp,
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        subprotocols: Sequence[str] = (),
        root_path: str = "",
        raise_on_send: bool = False,
    ) -> None:
        self._app = app
        self._scope = _scope(url, headers or {}, subprotocols, root_path)
        self._raise_on_send = raise_on_send
        # The subprotocol that the app has chosen.
        self.subprotocol: str | None = None
        self._group: TaskGroup | None = None
        self._to_app: deque[Message] = deque([{"type": "websocket.connect"}])
        self._to_client: deque[Message] = deque()
        self._change = anyio.Event()
        self._accepted = False
        self._gone: Message | None = None
        self._closed: WebSocketClosed | None = None
        self._error: Exception | None = None
        self._returned = False

    async def __aenter__(self) -> WebSocketSession:
        self._group = await anyio.create_task_group().__aenter__()
        try:
            self._group.start_soon(self._run)
            while not (self._accepted or self._closed or self._returned):
                await self._change.wait()
            if not self._accepted:
                raise self._why_closed()
        except BaseException as error:
            await self.__aexit__(type(error), error, error.__traceback__)
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        group, self._group = self._group, None
        if group is None:
            return
        self.disconnect()
        if error is not None and not isinstance(error, Exception):
            group.cancel_scope.cancel()
        await group.__aexit__(None, None, None)
        if error is None and self._error is not None:
            raise self._error

    async def send(self, message: str | bytes) -> None:
        """Send a text or a binary message.

        Raises:
            WebSocketClosed: the app has closed the connection.
        """
        await anyio.lowlevel.checkpoint()
        if self._closed is not None or self._returned:
            raise self._why_closed()
        kind = "text" if isinstance(message, str) else "bytes"
        self._to_app.append({"type": "websocket.receive", kind: message})
        self._changed()

    async def send_json(self, value: Any) -> None:
        """`send` a text message with this value."""
        await self.send(json.dumps(value))

    async def receive(self) -> str | bytes:
        """The next message of the app; what the app raised before it could send one is raised."""
        await anyio.lowlevel.checkpoint()
        while not self._to_client:
            if self._closed is not None or self._returned:
                raise self._why_closed()
            await self._change.wait()
        message = self._to_client.popleft()
        text: str | None = message.get("text")
        return message["bytes"] if text is None else text

    async def receive_json(self) -> Any:
        """`receive` a message and parse it."""
        return json.loads(await self.receive())

    def disconnect(self, code: int = 1005, reason: str = "") -> None:
        """Leave. What was sent before is still read by the app first."""
        if self._gone is None:
            self._gone = {"type": "websocket.disconnect", "code": code, "reason": reason}
            self._changed()

    async def _run(self) -> None:
        try:
            await self._app(self._scope, self._receive, self._send)
        except Exception as error:
            self._error = error
        finally:
            self._returned = True
            self._changed()

    async def _receive(self) -> Message:
        await anyio.lowlevel.checkpoint()
        while not self._to_app:
            if self._gone is not None:
                return self._gone
            if self._closed is not None:
                return {"type": "websocket.disconnect", "code": self._closed.code, "reason": ""}
            await self._change.wait()
        return self._to_app.popleft()

    async def _send(self, message: Message) -> None:
        await anyio.lowlevel.checkpoint()
        if self._gone is not None:
            if self._raise_on_send:
                raise OSError("the client has disconnected")
            return
        kind = message["type"]
        if self._closed is not None:
            raise RuntimeError(f"the app sent {kind!r} after it had closed the WebSocket")
        if kind == "websocket.close":
            default = 1000 if self._accepted else 1006
            code, reason = message.get("code", default), message.get("reason") or ""
            self._closed = WebSocketClosed(code, reason)
        elif kind == ("websocket.send" if self._accepted else "websocket.accept"):
            if self._accepted:
                self._to_client.append(message)
            else:
                self._accepted, self.subprotocol = True, message.get("subprotocol")
        else:
            raise RuntimeError(f"the app sent {kind!r} out of place")
        self._changed()

    def _why_closed(self) -> Exception:
        if self._closed is not None:
            return self._closed
        if self._error is not None:
            error, self._error = self._error, None
            return error
        return WebSocketClosed(1006, "the app returned")

    def _changed(self) -> None:
        self._change.set()
        self._change = anyio.Event()


def _scope(
    url: str, headers: Mapping[str, str], subprotocols: Sequence[str], root_path: str
) -> Scope:
    target = httpx.URL("ws://test").join(url)
    sent = httpx.Headers({"host": target.netloc.decode(), **headers})
    if subprotocols:
        sent["sec-websocket-protocol"] = ", ".join(subprotocols)
    return {
        "type": "websocket",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "scheme": target.scheme,
        "path": target.path,
        "raw_path": target.raw_path.split(b"?")[0],
        "query_string": target.query,
        "root_path": root_path,
        "headers": [(name.lower(), value) for name, value in sent.raw],
        "client": ("127.0.0.1", 1),
        "server": (target.host, target.port),
        "subprotocols": list(subprotocols),
        "state": {},
    }
