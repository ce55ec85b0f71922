"""A real `qwen3-asgi serve tiny` in a process of its own, and sockets that hang up on it."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from prometheus_client.parser import text_string_to_metric_families

from qwen3_asgi.bench.wire import Target

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator

START_SECONDS = 60
IDLE_SECONDS = 30


class Served:
    """The process, its base URL and what it printed after it ended."""

    def __init__(self, process: subprocess.Popen[str], url: str) -> None:
        self.process = process
        self.url = url
        self.target = Target.parse(url)
        self.output = ""

    def load(self) -> dict[str, Any]:
        load: dict[str, Any] = json.loads(self.target.get("/load"))
        return load

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples that have these labels."""
        text = self.target.get("/metrics").decode()
        return sum(
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Send a request and read the whole answer."""
        with self.target.send("POST", path, body) as connection:
            data = b"".join(iter(lambda: connection.recv(65536), b""))
        answer: dict[str, Any] = json.loads(data.partition(b"\r\n\r\n")[2])
        return answer

    def send(self, path: str, body: dict[str, Any]) -> socket.socket:
        """Send a request and leave the answer unread."""
        return self.target.send("POST", path, body)

    def wait_for(self, condition: Any, what: str, seconds: float = IDLE_SECONDS) -> dict[str, Any]:
        """Poll `/load` until `condition(load)`."""
        deadline = time.monotonic() + seconds
        while True:
            load = self.load()
            if condition(load):
                return load
            if time.monotonic() > deadline:
                raise AssertionError(f"not {what} after {seconds} s: {load}")
            time.sleep(0.002)

    def wait_idle(self) -> dict[str, Any]:
        return self.wait_for(lambda load: load["num_running"] + load["num_waiting"] == 0, "idle")

    def interrupt(self) -> int:
        """Ctrl-C; returns the exit status."""
        self.process.send_signal(signal.SIGINT)
        self.output += self.process.communicate(timeout=60)[0]
        return self.process.returncode


@contextmanager
def serve(*arguments: str) -> Iterator[Served]:
    """Run `qwen3-asgi serve` with these arguments on a free port until the block is left."""
    command = [sys.executable, "-m", "qwen3_asgi.cli", "serve", *arguments, "--port", "0"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, bufsize=1
    )
    try:
        yield _wait_started(process)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            try:
                process.communicate(timeout=30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()
        if process.stdout is not None:
            process.stdout.close()


def _wait_started(process: subprocess.Popen[str]) -> Served:
    deadline = time.monotonic() + START_SECONDS
    seen = []
    assert process.stdout is not None
    for line in process.stdout:
        seen.append(line)
        found = re.search(r"curl (http://[\d.]+:\d+)/metrics", line)
        if found:
            served = Served(process, found[1])
            served.output = "".join(seen)
            return served
        if time.monotonic() > deadline:
            break
    raise AssertionError(f"the server did not start: {''.join(seen)}")
