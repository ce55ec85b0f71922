"""200 MB uploads pass a real server with the middleware in constant memory, at the app's pace.

The same app answers behind `DisconnectMiddleware` and bare; what the middleware needs is the
difference, with and without a generation beside the upload.
"""

from __future__ import annotations

import hashlib
import json
import socket
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.hosts.server import WAIT_SECONDS, Server, serve, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.hosts.server import ServerKind

BLOCK = 1024 * 1024
BLOCKS = 200
LIMIT_BYTES = 4 * 1024 * 1024
STALL_SECONDS = 1.0
WATCHED = ("/watched", "")
GENERATING = ("/watched", "?generating")
BARE = ("/bare", "")


@pytest.fixture(scope="module", params=["uvicorn", "uvicorn-h11"])
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    kind: ServerKind = request.param
    with serve("tests.hosts.apps.upload_host:make", server=kind, factory=True) as server:
        for way in (BARE, WATCHED, GENERATING):  # imports, buffers, arenas
            with uploading(server, way, "discard", blocks=20) as upload:
                upload.send_all()
                upload.answer()
        yield server


class Upload:
    """A client that sends a body of so many blocks, each one different."""

    def __init__(self, connection: socket.socket, blocks: int) -> None:
        self.connection = connection
        self._blocks = blocks
        self._rest = memoryview(b"")
        self._next = 0
        self._digest = hashlib.sha256()
        self.sent = 0

    def send_all(self) -> None:
        """
        Raises:
            TimeoutError: the server does not take more; call again to go on.
        """
        while self.sent < self._blocks * BLOCK:
            if not self._rest:
                block = self._next.to_bytes(8) * (BLOCK // 8)
                self._digest.update(block)
                self._rest = memoryview(block)
                self._next += 1
            count = self.connection.send(self._rest)
            self._rest = self._rest[count:]
            self.sent += count

    def answer(self) -> dict[str, Any]:
        """The app's account of what it got, checked against what was sent."""
        self.connection.settimeout(WAIT_SECONDS)
        data = b""
        while chunk := self.connection.recv(65536):
            data += chunk
        head, _, body = data.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200"), data
        told: dict[str, Any] = json.loads(body)
        assert told["size"] == self._blocks * BLOCK
        assert told["sha256"] == self._digest.hexdigest()
        return told


@contextmanager
def uploading(
    server: Server, way: tuple[str, str], path: str, blocks: int = BLOCKS
) -> Iterator[Upload]:
    prefix, query = way
    with socket.create_connection(("127.0.0.1", server.port), timeout=WAIT_SECONDS) as connection:
        connection.sendall(
            f"POST {prefix}/{path}{query} HTTP/1.1\r\nHost: test\r\nConnection: close\r\n"
            f"Content-Length: {blocks * BLOCK}\r\n\r\n".encode()
        )
        yield Upload(connection, blocks)


class Memory:
    """A process's resident memory as Linux counts it, and its peak since the start of this."""

    def __init__(self, pid: int) -> None:
        self._status = Path(f"/proc/{pid}/status")
        Path(f"/proc/{pid}/clear_refs").write_text("5")  # the peak starts anew
        self._before = self._read("VmRSS")

    def extra(self) -> int:
        return self._read("VmHWM") - self._before

    def _read(self, name: str) -> int:
        lines = self._status.read_text().splitlines()
        return int(next(line for line in lines if line.startswith(f"{name}:")).split()[1]) * 1024


only_linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@only_linux
@pytest.mark.parametrize("way", [WATCHED, GENERATING], ids=["watched", "beside a generation"])
def test_an_upload_of_200_mb_needs_no_memory(
    server: Server, way: tuple[str, str], record_property: Callable[[str, object], None]
) -> None:
    extra = {}
    for one in (BARE, way):
        memory = Memory(server.process.pid)
        with uploading(server, one, "discard") as upload:
            upload.send_all()
            told = upload.answer()
        extra[one] = memory.extra()
        assert told["live"] == (one == GENERATING), "the generation must outlast the upload"
    record_property("extra_bytes", extra[way])
    record_property("extra_bytes_without_the_middleware", extra[BARE])
    assert extra[way] < LIMIT_BYTES
    assert extra[way] - extra[BARE] < LIMIT_BYTES


@only_linux
@pytest.mark.parametrize("way", [WATCHED, GENERATING], ids=["watched", "beside a generation"])
def test_an_app_that_does_not_read_holds_its_client_back(
    server: Server, way: tuple[str, str]
) -> None:
    reading = server.get("/bare/state").json()["reading"]
    memory = Memory(server.process.pid)
    with uploading(server, way, "later") as upload:
        wait_until(
            lambda: server.get("/bare/state").json()["reading"] == reading + 1, "the app waits"
        )
        upload.connection.settimeout(STALL_SECONDS)
        with pytest.raises(TimeoutError):
            upload.send_all()
        # What is sent is in the kernel's buffers, not in the server.
        assert upload.sent < BLOCKS * BLOCK // 2
        assert memory.extra() < LIMIT_BYTES
        server.get("/bare/go-on")
        upload.connection.settimeout(WAIT_SECONDS)
        upload.send_all()
        upload.answer()
    assert memory.extra() < LIMIT_BYTES
