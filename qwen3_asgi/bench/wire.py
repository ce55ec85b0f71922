"""Plain HTTP/1.1 for benchmarks: answers that are read, and requests that can be hung up."""

from __future__ import annotations

import http.client
import json
import socket
import urllib.parse
from dataclasses import dataclass
from typing import Any

TIMEOUT_SECONDS = 120.0


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
            connection = socket.create_connection((self.host, self.port), timeout=TIMEOUT_SECONDS)
        except OSError as error:
            raise ValueError(f"cannot connect to {self.host}:{self.port}: {error}") from error
        connection.sendall(
            f"{method} {self.path}{path} HTTP/1.1\r\nHost: {self.host}:{self.port}\r\n"
            f"Content-Type: application/json\r\nConnection: close\r\n"
            f"Content-Length: {len(payload)}\r\n\r\n".encode()
            + payload
        )
        return connection


class Probe:
    """GETs over one connection that is kept, so that a look costs the server little."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._connection = http.client.HTTPConnection(
            target.host, target.port, timeout=TIMEOUT_SECONDS
        )

    def get(self, path: str) -> bytes:
        """The body of a GET.

        Raises:
            ValueError: the status is not 200, or nobody answers there.
        """
        url = self._target.path + path
        try:
            try:
                status, body = self._get(url)
            except (ConnectionError, http.client.RemoteDisconnected):
                # A server may close a kept connection between two requests, when it has been idle
                # for long or has carried many.
                status, body = self._get(url)
        except (OSError, http.client.HTTPException) as error:
            where = f"{self._target.host}:{self._target.port}"
            raise ValueError(f"GET {url} from {where} failed: {error!r}") from error
        if status != 200:
            raise ValueError(f"GET {url} answered {status}")
        return body

    def _get(self, url: str) -> tuple[int, bytes]:
        try:
            self._connection.request("GET", url)
            response = self._connection.getresponse()
            return response.status, response.read()
        except BaseException:
            self._connection.close()  # the next request opens a new one
            raise

    def load(self) -> dict[str, Any]:
        """The server's `/load`."""
        load: dict[str, Any] = json.loads(self.get("/load"))
        return load

    def close(self) -> None:
        self._connection.close()
