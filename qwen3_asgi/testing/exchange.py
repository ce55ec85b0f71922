"""One request and its response, between a client that may hang up and the app: what a server does.

The client's side is called by the transport, the app's side is `run`. All in one event loop.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

import anyio
import anyio.lowlevel

from qwen3_asgi.testing.response import ResponseCheck

if TYPE_CHECKING:
    from collections.abc import AsyncIterable

    from starlette.types import ASGIApp, Message, Scope

# As servers cut a request's body.
PIECE_BYTES = 65536
DISCONNECT: Message = {"type": "http.disconnect"}


class HangUpPoint(NamedTuple):
    """When a client hangs up by itself: at most one of them is set, see `hang_up_at` and
    `hang_up_after` of the transport."""

    call: int | None = None
    turn: int | None = None
    messages: int | None = None
    bytes: int | None = None
    uploaded: int | None = None


NEVER = HangUpPoint()


class _Piece(NamedTuple):
    body: bytes
    more: bool


class Exchange:
    """`body` is the whole request body if it is at hand; else call `upload` beside `run`."""

    def __init__(
        self,
        app: ASGIApp,
        scope: Scope,
        *,
        body: bytes | None,
        point: HangUpPoint = NEVER,
        high_water_bytes: int,
        raise_on_send: bool = False,
    ) -> None:
        self._app = app
        self._scope = scope
        self._point = point
        self._high_water_bytes = high_water_bytes
        self._raise_on_send = raise_on_send
        # What the client has handed over, and the app has not read.
        self._pieces: deque[_Piece] = deque(() if body is None else _cut(body, more=False))
        self._uploading: anyio.CancelScope | None = None
        # What the app has sent, and the client has not read.
        self._chunks: deque[bytes] = deque()
        self._unread_bytes = 0
        self._response = ResponseCheck(scope["method"])
        self._calls = self._messages = self._sent_bytes = self._uploaded_bytes = 0
        self._change = anyio.Event()
        self._over = False  # no more comes from the app
        self._gone = False
        # Whether it was the point that made the client hang up.
        self.hung_up = False
        self.started = anyio.Event()
        self.ended = anyio.Event()
        self.error: Exception | None = None
        self.upload_error: Exception | None = None

    # ---- the client ----

    @property
    def has_response(self) -> bool:
        return self._response.started

    @property
    def complete(self) -> bool:
        return self._response.complete

    @property
    def status(self) -> int:
        return self._response.status

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        return self._response.headers

    def hang_up(self) -> None:
        """The client has gone. Means nothing once the response is complete."""
        if not self._over:
            self._gone = True
            self._finish()

    def take_error(self) -> Exception:
        error, self.error = self.error, None
        if error is None:
            raise RuntimeError("the app has raised nothing")
        return error

    async def next_chunk(self) -> bytes | None:
        """None after the last one."""
        while not self._chunks:
            if self._over or self._gone:
                return None
            await self._wait()
        chunk = self._chunks.popleft()
        self._unread_bytes -= len(chunk)
        self._changed()
        return chunk

    async def upload(self, stream: AsyncIterable[bytes]) -> None:
        """Hand the body over as the app reads it: the stream is asked for its next chunk when the
        app has taken the last one. What the stream raises ends the connection."""
        chunks = aiter(stream)
        try:
            with anyio.CancelScope() as self._uploading:
                if self._gone or self._over:
                    return
                try:
                    async for chunk in chunks:
                        if chunk:
                            await self._hand_over(chunk, more=True)
                    await self._hand_over(b"", more=False)
                finally:
                    # httpx leaves the generator that it wraps to the garbage collector.
                    for left in (chunks, getattr(stream, "_stream", None)):
                        close = getattr(left, "aclose", None)
                        if close is not None:
                            await close()
        except Exception as error:
            self.upload_error = error
            self.hang_up()

    async def tick(self, turns: int) -> None:
        """Hang up after so many turns of the event loop."""
        for _ in range(turns):
            if self._over or self._gone:
                return
            await anyio.lowlevel.checkpoint()
        self._hang_up_here()

    # ---- the app ----

    async def run(self) -> None:
        try:
            await self._app(self._scope, self._receive, self._send)
            if not self._gone:
                self._response.check_ended()
        except Exception as error:
            self.error = error
        finally:
            self._over = True
            self._finish()
            self.ended.set()

    async def _receive(self) -> Message:
        self._called()
        await anyio.lowlevel.checkpoint()
        while self._over or not self._pieces:
            if self._over or self._gone:
                return DISCONNECT
            await self._wait()
        piece = self._pieces.popleft()
        self._uploaded_bytes += len(piece.body)
        if self._uploaded_bytes >= (self._point.uploaded or self._uploaded_bytes + 1):
            self._hang_up_here()
        self._changed()
        return {"type": "http.request", "body": piece.body, "more_body": piece.more}

    async def _send(self, message: Message) -> None:
        self._called()
        await anyio.lowlevel.checkpoint()
        while self._unread_bytes >= self._high_water_bytes and not self._gone:
            await self._wait()
        if self._gone:  # servers swallow what is sent to a closed connection, most of them
            if self._raise_on_send:
                raise OSError("the client has disconnected")
            return
        chunk = self._response.accept(message)
        if self._response.started:
            self.started.set()
        if chunk:
            self._chunks.append(chunk)
            self._unread_bytes += len(chunk)
            self._sent_bytes += len(chunk)
        if self._response.complete:
            self._over = True
            self._pieces.clear()
            self._finish()
        self._messages += 1
        if self._messages == self._point.messages or (
            self._point.bytes is not None and self._sent_bytes >= self._point.bytes
        ):
            self._hang_up_here()
        self._changed()

    def _called(self) -> None:
        self._calls += 1
        if self._calls == self._point.call:
            self._hang_up_here()

    def _hang_up_here(self) -> None:
        if not self._over and not self._gone:
            self.hung_up = True
            self._pieces.clear()  # what has not been read never arrives
            self.hang_up()

    # ---- both ----

    async def _hand_over(self, body: bytes, *, more: bool) -> None:
        await anyio.lowlevel.checkpoint()  # ends here if the connection is closed already
        self._pieces.extend(_cut(body, more=more))
        self._changed()
        while self._pieces:
            await self._wait()
        await anyio.lowlevel.checkpoint()

    def _finish(self) -> None:
        if self._uploading is not None:
            self._uploading.cancel()
        self.started.set()
        self._changed()

    async def _wait(self) -> None:
        await self._change.wait()

    def _changed(self) -> None:
        self._change.set()
        self._change = anyio.Event()


def _cut(body: bytes, *, more: bool) -> list[_Piece]:
    starts = range(0, max(len(body), 1), PIECE_BYTES)
    return [
        _Piece(body[start : start + PIECE_BYTES], more or start + PIECE_BYTES < len(body))
        for start in starts
    ]
