"""Looking at a server's worker processes from outside."""

from __future__ import annotations

import json
import signal
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import httpx
import psutil

from tests.hosts.apps.worker_host import HOLD_FILE
from tests.hosts.server import serve, wait_until

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from tests.hosts.server import Server, ServerKind

SECONDS = 60.0
APP = "tests.hosts.apps.worker_host"
GUNICORN_CONFIG = """
from prometheus_client.multiprocess import mark_process_dead

control_socket_disable = True  # of gunicorn 25 and later: one file for all servers of a user

def child_exit(server, worker):
    mark_process_dead(worker.pid)
"""


class Workers:
    """A running server whose app is one of `worker_host`."""

    def __init__(self, server: Server, hold_file: Path) -> None:
        self.server = server
        self._hold_file = hold_file
        self.open: list[socket.socket] = []
        # A connection for each request, so that any worker may take it.
        server.client.headers["connection"] = "close"

    def where(self) -> dict[str, Any]:
        """What the worker says that took this connection."""
        seen: list[dict[str, Any]] = []

        def answered() -> bool:
            with suppress(httpx.TransportError):  # taken by one that was just ending
                seen.append(self.server.get("/where").json())
            return bool(seen)

        wait_until(answered, "an answer", SECONDS)
        return seen[0]

    def completion(self, max_tokens: int = 3) -> httpx.Response:
        body = {"model": "fake", "prompt": "x", "max_tokens": max_tokens}
        return self.server.post("/llm/v1/completions", body)

    def all_of(self, count: int) -> dict[int, dict[str, Any]]:
        """The first `count` workers that answer, by pid."""
        seen: dict[int, dict[str, Any]] = {}

        def asked() -> bool:
            found = self.where()
            seen[found["pid"]] = found
            return len(seen) >= count

        wait_until(asked, f"an answer from each of {count} workers", SECONDS)
        return seen

    def hold(self) -> None:
        """Every step of every worker, from the next one on."""
        self._hold_file.touch()

    def release(self) -> None:
        self._hold_file.unlink(missing_ok=True)

    def begin(self, max_tokens: int = 5) -> socket.socket:
        """A generation that streams for as long as the steps are held."""
        body = {"model": "fake", "prompt": "x", "max_tokens": max_tokens, "stream": True}
        connection = self.server.send("POST", "/llm/v1/completions", body)
        self.open.append(connection)
        return connection

    def both_busy(self) -> dict[int, int]:
        """Begin generations until each of two workers has a live one; how many each shows.

        A worker whose step is held takes no further ones in, so that is one each.
        """
        seen: dict[int, int] = {}

        def busy() -> bool:
            self.begin()
            seen.update({pid: found["live"] for pid, found in self.all_of(2).items()})
            return all(seen.values())

        wait_until(busy, "a live generation in each worker", SECONDS)
        return seen

    def processes(self) -> list[psutil.Process]:
        """Every process below the server's."""
        found: list[psutil.Process] = psutil.Process(self.server.process.pid).children(
            recursive=True
        )
        return found

    def live_by_metrics(self) -> float:
        return self.server.metric("vllm:num_requests_running") + self.server.metric(
            "vllm:num_requests_waiting"
        )

    def stop(self, sig: signal.Signals = signal.SIGTERM) -> None:
        """End it, and see that nothing is left of it.

        Raises:
            AssertionError: it did not end by itself, failed, or left a process or a traceback.
        """
        below = self.processes()
        log = self.server.stop(sig, SECONDS)
        assert self.server.process.returncode in (0, -sig, 128 + sig), log
        assert "Traceback" not in log, log
        gone, alive = psutil.wait_procs(below, SECONDS)
        assert (len(gone), alive) == (len(below), [])

    def close(self) -> None:
        self.release()
        for connection in self.open:
            connection.close()


@contextmanager
def serve_workers(
    make: str,
    folder: Path,
    server: ServerKind,
    *,
    options: Sequence[str] = (),
    num_workers: int = 2,
    app: str | None = None,
) -> Iterator[Workers]:
    """Run `worker_host.make` (or another `app`) in `num_workers` processes.

    prometheus_client is in its multiprocess mode, with its files in `folder`.
    """
    hold_file, metrics, config = folder / "hold", folder / "metrics", folder / "gunicorn.conf.py"
    metrics.mkdir()
    config.write_text(GUNICORN_CONFIG)
    own = ["--config", str(config)] if server.startswith("gunicorn") else []
    count = ["--workers", str(num_workers)] if num_workers > 1 else []
    env = {"PROMETHEUS_MULTIPROC_DIR": str(metrics), HOLD_FILE: str(hold_file)}
    with serve(
        app or f"{APP}:{make}",
        server=server,
        factory=app is None,
        env=env,
        options=[*own, *count, *options],
    ) as running:
        workers = Workers(running, hold_file)
        try:
            # Not before: uvicorn logs the address that its worker does not listen on yet.
            workers.all_of(num_workers)
            yield workers
        finally:
            workers.close()


def text_of(connection: socket.socket) -> str:
    """What a stream says until the server closes or the answer is complete."""
    data = b""
    while b"[DONE]" not in data:
        chunk = connection.recv(65536)
        assert chunk, f"the stream ended early: {data!r}"
        data += chunk
    lines = [line for line in data.decode().splitlines() if line.startswith("data: {")]
    return "".join(json.loads(line.removeprefix("data: "))["choices"][0]["text"] for line in lines)
