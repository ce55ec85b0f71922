"""One running server of the matrix, and what a cell of it may do and look at."""

from __future__ import annotations

import os
import re
import ssl
import uuid
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import psutil

from tests.hosts.matrix.certificate import certificate
from tests.hosts.matrix.clients import Http1, Http2
from tests.hosts.server import serve, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.hosts.matrix.clients import Connection
    from tests.hosts.server import Server, ServerKind

APP = "tests.hosts.matrix.app"
# How often a cell that does not expect something looks for it: each is a turn of the server's event
# loop, and all of them together take many times what the servers that do it need.
GLANCES = 25

_TLS_PORT = re.compile(r"endpoint ssl:.*\n.*Listening on TCP address 127\.0\.0\.1:(\d+)")
UVICORN = ("--no-access-log", "--timeout-graceful-shutdown", "1")


@dataclass(frozen=True)
class Column:
    """A server with its options. `tls`: it speaks HTTP/2 over TLS only."""

    name: str
    kind: ServerKind
    options: tuple[str, ...] = ()
    http2: bool = True
    tls: bool = False


# The time limits are for Ctrl-C with a live stream, see docs/servers.md.
COLUMNS = (
    Column("uvicorn h11", "uvicorn-h11", (*UVICORN, "--loop", "asyncio"), http2=False),
    Column("uvicorn httptools", "uvicorn", (*UVICORN, "--http", "httptools"), http2=False),
    Column("hypercorn asyncio", "hypercorn-asyncio", ("--graceful-timeout", "1")),
    Column("hypercorn trio", "hypercorn-trio", ("--graceful-timeout", "1")),
    Column("granian", "granian", ("--workers-kill-timeout", "1")),
    Column("daphne", "daphne", ("--access-log", os.devnull), tls=True),
)


class Place(NamedTuple):
    """A column of one of the two tables."""

    column: Column
    http2: bool

    @property
    def name(self) -> str:
        return f"{self.column.name} {'HTTP/2' if self.http2 else 'HTTP/1.1'}"


PLACES = tuple(
    Place(column, http2)
    for column in COLUMNS
    for http2 in ([False, True] if column.http2 else [False])
)


class Counters(NamedTuple):
    wasted: int
    cancelled: int

    def __sub__(self, before: Counters) -> Counters:
        return Counters(self.wasted - before.wasted, self.cancelled - before.cancelled)


class Host:
    """Calls into the app's `/stage/…` and `/llm/metrics`, and connections to it."""

    def __init__(self, server: Server, connect: Callable[[], Connection]) -> None:
        self.server = server
        self._connect = connect
        self._open = ExitStack()

    def connect(self) -> Connection:
        """Closed by `close_connections`, if not by the cell."""
        connection = self._connect()
        self._open.callback(connection.socket.close)
        return connection

    def close_connections(self) -> None:
        self._open.close()

    def tag(self) -> str:
        """A name for a request that no other one has."""
        return uuid.uuid4().hex

    def state(self, tag: str = "") -> dict[str, Any]:
        answer = self.server.get(f"/stage/state?of={tag}").raise_for_status()
        state: dict[str, Any] = answer.json()
        return state

    def call(self, tag: str) -> dict[str, Any] | None:
        """What the app has seen of a request; None if it was not called for it."""
        call: dict[str, Any] | None = self.state(tag)["call"]
        return call

    def arm(self, steps: int) -> None:
        self.server.get(f"/stage/arm?steps={steps}").raise_for_status()

    def wait_held(self) -> int:
        """Wait until the armed step has begun; returns how many have."""
        wait_until(lambda: self.state()["held"], "the armed step")
        steps: int = self.state()["steps"]
        return steps

    def release(self) -> None:
        self.server.get("/stage/release").raise_for_status()

    def told(self, tag: str) -> bool:
        call = self.call(tag)
        return call is not None and call["disconnected_at"] is not None

    def wait_told(self, tag: str) -> None:
        wait_until(lambda: self.told(tag), "the server tells the app that its client has gone")

    def glance(self, holds: Callable[[], Any]) -> bool:
        """Whether it comes true soon, where that is not to be expected. `holds` asks the server."""
        return any(holds() for _ in range(GLANCES))

    def wait_ended(self, tag: str) -> dict[str, Any]:
        """Wait for the end of the app's call for this request."""

        def ended() -> bool:
            call = self.call(tag)
            return call is not None and call["ended"] is not None

        wait_until(ended, "the app's call has ended")
        call = self.call(tag)
        assert call is not None
        return call

    def wait_idle(self) -> dict[str, Any]:
        wait_until(lambda: not self.state()["live"], "no generation is live")
        self.server.wait_idle()
        return self.state()

    def counters(self) -> Counters:
        return Counters(**self.state()["counters"])

    def has_connection_from(self, port: int) -> bool:
        """Whether the server still holds its end of the connection from this port."""
        parent = psutil.Process(self.server.process.pid)
        return any(
            connection.raddr and connection.raddr.port == port
            for process in (parent, *parent.children(recursive=True))
            for connection in process.net_connections(kind="tcp")
        )


class Hosts:
    """The matrix's servers, each started when its first cell asks for it.

    Args:
        module: has the app as `app`, and for servers that take a factory as `make()`.
        folder: for the certificate.
    """

    def __init__(self, folder: Path, module: str = APP) -> None:
        self._folder = folder
        self._module = module
        self._running: tuple[Column, Server] | None = None
        self._stack = ExitStack()

    def host(self, column: Column, *, http2: bool = False) -> Host:
        """One server runs at a time, so ask column by column."""
        if self._running is None or self._running[0] is not column:
            self.close()
            factory = column.kind != "daphne"
            app = f"{self._module}:make" if factory else f"{self._module}:app"
            options = self._options(column)
            context = serve(app, server=column.kind, factory=factory, options=options)
            self._running = column, self._stack.enter_context(context)
        server = self._running[1]
        if not http2:
            return Host(server, lambda: Http1(server.port))
        if not column.tls:
            return Host(server, lambda: Http2(server.port))
        found = _TLS_PORT.search(server.log)
        assert found, server.log
        port = int(found[1])
        trusting = ssl.create_default_context(cafile=str(certificate(self._folder).cert))
        trusting.set_alpn_protocols(["h2"])
        return Host(server, lambda: Http2(port, tls=trusting))

    def _options(self, column: Column) -> list[str]:
        if not column.tls:
            return list(column.options)
        files = certificate(self._folder)
        tls = f"ssl:0:privateKey={files.key}:certKey={files.cert}:interface=127.0.0.1"
        return [*column.options, "--endpoint", tls]

    def close(self) -> None:
        self._running = None
        self._stack.close()
