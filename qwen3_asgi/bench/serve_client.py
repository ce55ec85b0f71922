"""Load on an OpenAI-compatible server: many streams, read by one thread over plain sockets.

Closed: a number of clients, each of which sends its next request when it has its answer. Open:
requests at given moments, however many are still being answered.
"""

from __future__ import annotations

import json
import selectors
import socket
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from qwen3_asgi.bench.serve_wire import Answer, Reader, WireError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from qwen3_asgi.bench.wire import Target

READ_BYTES = 1 << 18
TICK_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Work:
    """One request: its JSON body, and how many tokens it may have."""

    body: dict[str, Any]
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where requests go. `path` is below the target's, such as `/v1/completions`."""

    target: Target
    path: str
    api_key: str | None = None
    timeout: float = 600.0

    def request(self, work: Work) -> bytes:
        target = self.target
        payload = json.dumps(work.body).encode()
        key = f"Authorization: Bearer {self.api_key}\r\n" if self.api_key else ""
        return (
            f"POST {target.path}{self.path} HTTP/1.1\r\nHost: {target.host}:{target.port}\r\n"
            f"Content-Type: application/json\r\nAccept: text/event-stream\r\n{key}"
            f"Connection: close\r\nContent-Length: {len(payload)}\r\n\r\n"
        ).encode() + payload


class _Stream:
    """One request under way."""

    def __init__(self, endpoint: Endpoint, work: Work) -> None:
        self.answer = Answer(time.perf_counter(), work.max_tokens)
        self.reader = Reader(self.answer)
        self.socket = socket.create_connection(
            (endpoint.target.host, endpoint.target.port), timeout=endpoint.timeout
        )
        try:
            self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.socket.sendall(endpoint.request(work))
            self.socket.setblocking(False)
        except OSError:
            self.socket.close()
            raise
        self.deadline = self.answer.begin + endpoint.timeout


def run_load(
    endpoint: Endpoint,
    work: Sequence[Work],
    *,
    clients: int | None = None,
    moments: Sequence[float] | None = None,
) -> list[Answer]:
    """Do all the work; one answer for each, in the order in which they ended.

    Args:
        endpoint: the server.
        work: what to send, in this order.
        clients: how many requests are under way at once.
        moments: instead, seconds from now at which each request is sent.
    """
    load = _Load(endpoint)
    waiting = deque(work)
    try:
        if moments is None:
            for _ in range(min(clients or 1, len(waiting))):
                load.send(waiting.popleft())
            while len(load) or waiting:
                for _ in range(load.read(TICK_SECONDS)):
                    if waiting:
                        load.send(waiting.popleft())
        else:
            begin = time.perf_counter()
            due = deque(moments)
            while len(load) or waiting:
                left = begin + due[0] - time.perf_counter() if due else TICK_SECONDS
                if waiting and left <= 0:
                    due.popleft()
                    load.send(waiting.popleft())
                else:
                    load.read(min(left, TICK_SECONDS))
    finally:
        load.close()
    return load.answers


class _Load:
    """The streams under way. `_failed` requests have ended before a byte was sent."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.answers: list[Answer] = []
        self._endpoint = endpoint
        self._selector = selectors.DefaultSelector()
        self._streams: set[_Stream] = set()
        self._failed = 0
        self._look_at = 0.0

    def __len__(self) -> int:
        return len(self._streams) + self._failed

    def send(self, work: Work) -> None:
        begin = time.perf_counter()
        try:
            stream = _Stream(self._endpoint, work)
        except OSError as error:
            name = "refused" if isinstance(error, ConnectionRefusedError) else "cannot connect"
            now = time.perf_counter()
            self.answers.append(Answer(begin, work.max_tokens, now, name, str(error)))
            self._failed += 1  # its client goes on at the next `read`
            return
        self._streams.add(stream)
        self._selector.register(stream.socket, selectors.EVENT_READ, stream)

    def read(self, seconds: float) -> int:
        """Read what has come, or wait for it this long; the number of requests that ended."""
        before, failed = len(self.answers), self._failed
        self._failed = 0
        for key, _ in self._selector.select(0 if failed else max(0.0, seconds)):
            self._read(key.data)
        now = time.perf_counter()
        if now >= self._look_at:
            self._look_at = now + TICK_SECONDS
            for stream in [each for each in self._streams if each.deadline < now]:
                self._end(stream, WireError("timeout", f"after {self._endpoint.timeout:g} s"))
        return len(self.answers) - before + failed

    def _read(self, stream: _Stream) -> None:
        try:
            data = stream.socket.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            self._end(stream, WireError("dropped", str(error)))
            return
        now = time.perf_counter()
        try:
            if not (data and not stream.reader.feed(data, now)):
                stream.reader.close(now)
                self._end(stream, None)
        except WireError as error:
            self._end(stream, error)

    def _end(self, stream: _Stream, error: WireError | None) -> None:
        self._selector.unregister(stream.socket)
        stream.socket.close()
        self._streams.remove(stream)
        if error is not None:
            stream.answer.end = time.perf_counter()
            stream.answer.error, stream.answer.detail = error.kind, str(error)
        self.answers.append(stream.answer)

    def close(self) -> None:
        for stream in self._streams:
            stream.socket.close()
        self._selector.close()
