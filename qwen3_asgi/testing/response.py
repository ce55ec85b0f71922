"""What servers demand of a response: its messages in order, and as many bytes as promised."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starlette.types import Message

START, BODY = "http.response.start", "http.response.body"
WITHOUT_BODY = (204, 304)


class ResponseCheck:
    """One response. Raises `RuntimeError` where a server would refuse, as servers do."""

    def __init__(self, method: str) -> None:
        self.status = 500
        self.headers: list[tuple[bytes, bytes]] = []
        self.started = False
        self.complete = False
        self._is_head = method == "HEAD"
        self._promised_bytes: int | None = None
        self._sent_bytes = 0

    def accept(self, message: Message) -> bytes:
        """Take the next message and return the bytes that the client gets."""
        kind = message["type"]
        if self.complete:
            raise RuntimeError(f"the app sent {kind!r} after its response was complete")
        expected = BODY if self.started else START
        if kind != expected:
            raise RuntimeError(f"the app sent {kind!r}, but {expected!r} was to come")
        if kind == START:
            self._start(message)
            return b""
        return self._body(message)

    def check_ended(self) -> None:
        """The app has returned."""
        if not self.started:
            raise RuntimeError("the app returned without sending a response")
        if not self.complete:
            raise RuntimeError("the app returned before its response was complete")

    def _start(self, message: Message) -> None:
        self.status = message["status"]
        self.headers = [(bytes(name), bytes(value)) for name, value in message.get("headers", [])]
        for name, value in self.headers:
            if name.lower() == b"content-length":
                self._promised_bytes = int(value)
        self.started = True

    def _body(self, message: Message) -> bytes:
        body = message.get("body", b"")
        if not isinstance(body, bytes | bytearray | memoryview):
            raise TypeError(f"the app sent a body of {type(body).__name__}, not of bytes")
        self.complete = not message.get("more_body", False)
        if self._is_head:  # servers drop it
            return b""
        self._sent_bytes += len(body)
        if self.status in WITHOUT_BODY:
            if self._sent_bytes:
                raise RuntimeError(f"the app sent a body with status {self.status}, which has none")
        elif self._promised_bytes is not None:
            sent = f"{self._sent_bytes} bytes, but its Content-Length is {self._promised_bytes}"
            if self._sent_bytes > self._promised_bytes:
                raise RuntimeError(f"the app sent {sent}")
            if self.complete and self._sent_bytes < self._promised_bytes:
                raise RuntimeError(f"the app sent only {sent}")
        return bytes(body)
