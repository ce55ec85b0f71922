"""Real server processes and raw clients for tests: start, look inside through HTTP, hang up, stop.

For example:

    with serve("examples.starlette_app:app") as server:
        connection = server.send("POST", "/llm/v1/completions", {...})
        wait_until(lambda: server.load()["num_running"] == 1, "it runs")
        connection.close()
        server.wait_idle()
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

ROOT = Path(__file__).parents[2]
WAIT_SECONDS = 30.0
POLL_SECONDS = 0.005

ServerKind = Literal[
    "uvicorn",
    "uvicorn-h11",
    "hypercorn-asyncio",
    "hypercorn-trio",
    "granian",
    "daphne",
    "gunicorn",
    "gunicorn-asgi",
]

# Of daphne's endpoints the plain one: it may have one with TLS beside it.
_ADDRESS = re.compile(
    r"(?:[Rr]unning on|Listening at:) http://127\.0\.0\.1:([1-9]\d*)"
    r"|endpoint tcp:.*\n.*Listening on TCP address 127\.0\.0\.1:(\d+)"
)


def wait_until(holds: Callable[[], Any], what: str, seconds: float = WAIT_SECONDS) -> None:
    """Poll until `holds()` is true.

    Raises:
        AssertionError: it never was; `what` and the last value are in the message.
    """
    deadline = time.monotonic() + seconds
    while not (value := holds()):
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds} s: {what} (last: {value!r})")
        time.sleep(POLL_SECONDS)


@dataclass
class Server:
    """A running server. `mount` is where the app of `create_app` is."""

    process: subprocess.Popen[bytes]
    port: int
    log_path: Path
    mount: str = "/llm"
    client: httpx.Client = field(init=False)

    def __post_init__(self) -> None:
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=WAIT_SECONDS)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}{self.mount}"

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def get(self, path: str) -> httpx.Response:
        return self.client.get(path)

    def post(self, path: str, body: Mapping[str, Any]) -> httpx.Response:
        return self.client.post(path, json=body)

    def load(self) -> dict[str, Any]:
        load: dict[str, Any] = self.get(f"{self.mount}/load").raise_for_status().json()
        return load

    def metric(self, name: str, **labels: str) -> float:
        """The sum over a sample's series that have these labels, as a scraper reads it."""
        text = self.get(f"{self.mount}/metrics").raise_for_status().text
        return sum(
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    def wait_idle(self) -> dict[str, Any]:
        """The first load snapshot that says 0/0 with no KV block in use."""
        seen: dict[str, Any] = {}

        def idle() -> bool:
            seen.update(self.load())
            return not (seen["num_running"] or seen["num_waiting"] or seen["kv_used_blocks"])

        wait_until(idle, "0 running, 0 waiting, no KV block in use")
        return seen

    def send(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        encoding: str = "identity",
    ) -> socket.socket:
        """Open a connection and send one request; close it at any moment to hang up."""
        payload = b"" if body is None else json.dumps(body).encode()
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=WAIT_SECONDS)
        connection.sendall(
            f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1:{self.port}\r\n"
            f"Accept-Encoding: {encoding}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(payload)}\r\n\r\n".encode()
            + payload
        )
        return connection

    def stop(self, sig: signal.Signals = signal.SIGINT, seconds: float = WAIT_SECONDS) -> str:
        """Send the signal, wait for the end, return the log."""
        self.client.close()
        if self.process.poll() is None:
            self.process.send_signal(sig)
        try:
            self.process.wait(seconds)
        finally:
            _kill(self.process)
        return self.log

    def stop_cleanly(self) -> None:
        """End it by Ctrl-C.

        Raises:
            AssertionError: it did not end by itself, or left a traceback.
        """
        log = self.stop()
        # Some servers raise the signal again when they are done, for their parent to see.
        assert self.process.returncode in (0, -signal.SIGINT, 128 + signal.SIGINT), log
        assert "Traceback" not in log, log


def read_until(connection: socket.socket, marker: bytes) -> bytes:
    """What the server sent up to and including the chunk with `marker`.

    Raises:
        AssertionError: the connection ended before.
    """
    data = b""
    while marker not in data:
        chunk = connection.recv(65536)
        assert chunk, f"the connection ended without {marker!r}: {data!r}"
        data += chunk
    return data


@contextmanager
def serve(
    app: str,
    *,
    server: ServerKind = "uvicorn",
    factory: bool = False,
    mount: str = "/llm",
    env: Mapping[str, str] | None = None,
    lifespan: bool = True,
    options: Sequence[str] = (),
) -> Iterator[Server]:
    """Run `module:attribute` in a server process on a free port; killed at the end.

    Args:
        factory: the attribute is called and returns the app. Not with daphne, which can't.
        lifespan: false switches the protocol off. hypercorn has no switch, daphne no lifespan.
        options: more of the server's own command line.
    """
    arguments = [*_arguments(server, app, factory=factory, lifespan=lifespan), *options]
    with _run(arguments, mount, env) as running:
        yield running


@contextmanager
def serve_model(*arguments: str) -> Iterator[Server]:
    """Run `qwen3-asgi serve` with these arguments in a process on a free port."""
    with _run(["qwen3_asgi.cli", "serve", *arguments, "--port", "0"], "", None) as running:
        yield running


@contextmanager
def _run(arguments: Sequence[str], mount: str, env: Mapping[str, str] | None) -> Iterator[Server]:
    with tempfile.TemporaryDirectory() as folder:
        log_path = Path(folder) / "server.log"
        with log_path.open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", *arguments],
                cwd=ROOT,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **(env or {})},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        running: Server | None = None
        try:
            running = Server(process, _port(process, log_path), log_path, mount)
            yield running
        finally:
            if running is not None:
                running.client.close()
            _kill(process)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """With its workers, which would outlive it."""
    family: list[psutil.Process] = []
    if process.poll() is None:
        family = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.wait()
    for member in family:
        with suppress(psutil.NoSuchProcess):
            member.kill()


def _arguments(server: ServerKind, app: str, *, factory: bool, lifespan: bool) -> list[str]:
    match server:
        case "uvicorn" | "uvicorn-h11":
            http = "h11" if server == "uvicorn-h11" else "auto"
            off = [] if lifespan else ["--lifespan", "off"]
            arguments = ["uvicorn", app, "--port", "0", "--http", http, *off]
            return [*arguments, "--factory"] if factory else arguments
        case "granian":
            interface = "asgi" if lifespan else "asginl"
            arguments = ["granian", app, "--port", "0", "--interface", interface]
            return [*arguments, "--factory"] if factory else arguments
        case "daphne":
            if factory:
                raise ValueError("daphne calls no factory: give it the app")
            return ["daphne", app, "--bind", "127.0.0.1", "--port", "0"]
        case "gunicorn" | "gunicorn-asgi":
            if not lifespan:
                raise ValueError("uvicorn's worker class has no switch for the lifespan")
            worker = "asgi" if server == "gunicorn-asgi" else "uvicorn_worker.UvicornWorker"
            arguments = ["gunicorn", app + "()" * factory, "--bind", "127.0.0.1:0"]
            return [*arguments, "--worker-class", worker]
    loop = server.removeprefix("hypercorn-")
    if not lifespan:
        raise ValueError("hypercorn cannot switch the lifespan off")
    return ["hypercorn", app + "()" * factory, "--bind", "127.0.0.1:0", "--worker-class", loop]


def _port(process: subprocess.Popen[bytes], log_path: Path) -> int:
    """The port it listens on: no race for a port that was free a moment ago."""
    found: list[int] = []

    def announced() -> bool:
        log = log_path.read_text(errors="replace")
        found.extend(int(a or b) for a, b in _ADDRESS.findall(log))
        if "Started worker" in log:  # granian logs port 0, as it was asked for
            found.extend(_listening(process.pid))
        assert found or process.poll() is None, f"the server did not start:\n{log}"
        return bool(found)

    wait_until(announced, "the server's address in its log")
    return found[0]


def _listening(pid: int) -> list[int]:
    """The ports a process or one of its workers listens on."""
    parent = psutil.Process(pid)
    return [
        connection.laddr.port
        for process in (parent, *parent.children(recursive=True))
        for connection in process.net_connections(kind="tcp")
        if connection.status == psutil.CONN_LISTEN
    ]
