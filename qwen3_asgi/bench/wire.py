"""Plain HTTP/1.1 over sockets for benchmarks: a client that can be closed at any moment."""

from __future__ import annotations

import json
import socket
import urllib.parse
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Target:
    """Where to connect, from a base URL such as `http://127.0.0.1:8000/llm`."""

    host: str
    port: int
    path: str

    @classmethod
    def parse(cls, url: str) -> Target:
        """
        Raises:
            ValueError: not an http URL.
        """
        parts = urllib.parse.urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme != "http" or not parts.hostname:
            raise ValueError(f"an http:// URL is needed, got {url!r}")
        return cls(parts.hostname, parts.port or 80, parts.path.rstrip("/"))

    def send(self, method: str, path: str, body: dict[str, Any] | None = None) -> socket.socket:
        """Open a connection and send one request; the caller reads the answer or closes.

        Raises:
            ValueError: nobody listens there.
        """
        payload = b"" if body is None else json.dumps(body).encode()
        try:
            connection = socket.create_connection((self.host, self.port), timeout=120)
        except OSError as error:
            raise ValueError(f"cannot connect to {self.host}:{self.port}: {error}") from error
        connection.sendall(
            f"{method} {self.path}{path} HTTP/1.1\r\nHost: {self.host}:{self.port}\r\n"
            f"Content-Type: application/json\r\nConnection: close\r\n"
            f"Content-Length: {len(payload)}\r\n\r\n".encode()
            + payload
        )
        return connection

    def get(self, path: str) -> bytes:
        """The body of a GET.

        Raises:
            ValueError: the status is not 200.
        """
        with self.send("GET", path) as connection:
            data = b"".join(iter(lambda: connection.recv(65536), b""))
        head, _, body = data.partition(b"\r\n\r\n")
        status = head.split(b"\r\n", 1)[0].decode("latin-1")
        if " 200 " not in f"{status} ":
            raise ValueError(f"GET {self.path}{path} answered {status!r}")
        if b"transfer-encoding: chunked" in head.lower():
            body = _join_chunks(body)
        return body


def _join_chunks(data: bytes) -> bytes:
    out = []
    while data:
        size, _, data = data.partition(b"\r\n")
        count = int(size, 16)
        out.append(data[:count])
        data = data[count + 2 :]
    return b"".join(out)
