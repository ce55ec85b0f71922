"""A hand-driven ASGI server side: the test puts messages in and sees what was sent and read."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel

if TYPE_CHECKING:
    from starlette.types import Message, Scope

DISCONNECT: Message = {"type": "http.disconnect"}
EMPTY: Message = {"type": "http.request", "body": b"", "more_body": False}
START: Message = {"type": "http.response.start", "status": 200, "headers": []}
END: Message = {"type": "http.response.body", "body": b"", "more_body": False}


def part(body: bytes, *, more: bool = True) -> Message:
    return {"type": "http.request", "body": body, "more_body": more}


def chunk(body: bytes) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": True}


def http_scope(**fields: Any) -> Scope:
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "GET",
        "scheme": "http",
        "path": "/",
        "raw_path": b"/",
        "query_string": b"",
        "root_path": "",
        "headers": [],
        "client": ("127.0.0.1", 1),
        "server": ("test", 80),
    } | fields


class Wire:
    """`receive` and `send` of one connection. A disconnect is repeated forever, as servers do."""

    def __init__(self, *messages: Message | Exception) -> None:
        self.calls = 0
        self.readers = 0
        self.most_readers = 0
        self.sent: list[Message] = []
        self.send_error: Exception | None = None
        self._messages: deque[Message | Exception] = deque(messages)
        self._news = anyio.Event()

    def put(self, *messages: Message | Exception) -> None:
        self._messages.extend(messages)
        self._news.set()

    @property
    def unread(self) -> int:
        return len(self._messages)

    @property
    def sent_types(self) -> list[str]:
        return [message["type"] for message in self.sent]

    async def receive(self) -> Message:
        self.calls += 1
        self.readers += 1
        self.most_readers = max(self.most_readers, self.readers)
        try:
            await anyio.lowlevel.checkpoint()
            while not self._messages:
                self._news = anyio.Event()
                await self._news.wait()
            message = self._messages[0]
            if isinstance(message, Exception) or not message["type"].endswith(".disconnect"):
                self._messages.popleft()
        finally:
            self.readers -= 1
        if isinstance(message, Exception):
            raise message
        return message

    async def send(self, message: Message) -> None:
        await anyio.lowlevel.checkpoint()
        if self.send_error is not None:
            raise self.send_error
        self.sent.append(message)
