"""The incoming ASGI messages of one request, read by the app and by a watcher without loss.

Only one of them is ever inside the server's `receive`. What the watcher reads is handed to the app
unchanged and in order.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import anyio

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.types import Message, Receive

# How far the watcher reads ahead of the app. Behind more unread body than this, a disconnect is
# seen only when the app reads on.
READ_AHEAD_BYTES = 65536
READ_AHEAD_MESSAGES = 64
_DISCONNECTS = ("http.disconnect", "websocket.disconnect")


class Inflow:
    """Wraps the server's `receive`. Used in one event loop only."""

    def __init__(self, receive: Receive, on_disconnect: Callable[[], None]) -> None:
        self._receive = receive
        self._on_disconnect = on_disconnect
        self._ahead: deque[Message] = deque()
        self._ahead_bytes = 0
        self._reading = False
        # Whether somebody read for the app: what it has not read itself must not get lost.
        self._ahead_of_app = False
        # The disconnect message. If the watcher has read, it is handed out forever from then on; if
        # not, the server is asked each time, as without us.
        self._end: Message | None = None
        # What the server's `receive` raised in the watcher; the app's next read raises it.
        self._failure: Exception | None = None
        self._change: anyio.Event | None = None

    async def receive(self) -> Message:
        """The app's `receive`."""
        while True:
            if self._ahead:
                message = self._ahead.popleft()
                self._ahead_bytes -= _size(message)
                self._changed()
                return message
            if self._end is not None and self._ahead_of_app:
                return self._end
            if self._failure is not None:
                try:
                    raise self._failure
                finally:
                    self._failure = None
            if not self._reading:
                return await self._read()
            await self._wait()

    async def read_ahead(self) -> None:
        """The watcher: read until the client has gone or `receive` fails. Cancel it to stop."""
        self._ahead_of_app = True
        while self._end is None:
            if self._reading or self._is_full():
                await self._wait()  # the app is reading itself, or has not kept up
                continue
            try:
                message = await self._read()
            except Exception as error:
                self._failure = error
                return
            if message is not self._end:
                self._ahead.append(message)
                self._ahead_bytes += _size(message)
                self._changed()

    def ignore_disconnect(self) -> None:
        """Whatever comes now is passed on, but `on_disconnect` is not called any more."""
        self._on_disconnect = _ignore

    async def _read(self) -> Message:
        self._reading = True
        try:
            message = await self._receive()
        finally:
            self._reading = False
            self._changed()
        if message["type"] in _DISCONNECTS:
            self._end = message
            self._on_disconnect()
        return message

    def _is_full(self) -> bool:
        return self._ahead_bytes >= READ_AHEAD_BYTES or len(self._ahead) >= READ_AHEAD_MESSAGES

    async def _wait(self) -> None:
        if self._change is None:
            self._change = anyio.Event()
        await self._change.wait()

    def _changed(self) -> None:
        if self._change is not None:
            self._change.set()
            self._change = None


def _ignore() -> None:
    pass


def _size(message: Message) -> int:
    return len(message.get("body") or message.get("bytes") or message.get("text") or b"")
