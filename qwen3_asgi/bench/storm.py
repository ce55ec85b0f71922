"""The disconnect storm: N clients with long prompts hang up at once; what does the server do then?

Reads `/load` and `/metrics` of the server, so its numbers are the server's own: scheduler steps and
milliseconds to 0/0, tokens computed for gone clients, and a follow-up's TTFT against a lone one.
"""

from __future__ import annotations

import json
import statistics
import threading
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from prometheus_client.parser import text_string_to_metric_families

from qwen3_asgi.bench.wire import Target

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

LONE_REQUESTS = 5
WAIT_SECONDS = 120.0
POLL_SECONDS = 0.001


@dataclass(frozen=True, slots=True)
class StormOptions:
    """`kind`: clients stream, don't ("plain"), or half and half ("both")."""

    model: str = "tiny"
    clients: int = 8
    kind: str = "both"
    prompt_words: int = 300
    max_tokens: int = 256


@dataclass(frozen=True, slots=True)
class StormReport:
    """Times in milliseconds; `steps_to_idle` counts forward passes begun after the hang-up."""

    clients: int
    kind: str
    running_before: int
    waiting_before: int
    idle_ms: float
    steps_to_idle: int
    iterations_to_idle: int
    wasted_tokens: int
    kv_used_blocks_after: int
    lone_ttft_ms: float
    follow_up_ttft_ms: float

    @property
    def follow_up_ratio(self) -> float:
        return self.follow_up_ttft_ms / self.lone_ttft_ms

    def to_json(self) -> str:
        return json.dumps({**asdict(self), "follow_up_ratio": round(self.follow_up_ratio, 2)})


def table(report: StormReport) -> str:
    """The report as lines for a person."""
    rows = [
        ("clients", f"{report.clients} ({report.kind})"),
        ("running/waiting before", f"{report.running_before}/{report.waiting_before}"),
        ("hang-up to 0/0", f"{report.idle_ms:.1f} ms"),
        ("forward passes until 0/0", str(report.steps_to_idle)),
        ("scheduler iterations until 0/0", str(report.iterations_to_idle)),
        ("tokens computed for gone clients", str(report.wasted_tokens)),
        ("KV blocks in use after", str(report.kv_used_blocks_after)),
        ("TTFT, lone request (median)", f"{report.lone_ttft_ms:.1f} ms"),
        ("TTFT, follow-up sent at the hang-up", f"{report.follow_up_ttft_ms:.1f} ms"),
        ("ratio", f"{report.follow_up_ratio:.2f}"),
    ]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def run_storm(url: str, options: StormOptions) -> StormReport:
    """Two storms against a running server: one is timed to 0/0, after one a follow-up is sent.

    Raises:
        ValueError: the server has no `/load`, or never got busy or idle.
    """
    target = Target.parse(url)
    _ttft(target, options, "warm up")
    lone = statistics.median(_ttft(target, options, f"lone {i}") for i in range(LONE_REQUESTS))

    wasted_before = _wasted(target)
    sockets = _start_clients(target, options, "first")
    before = _wait_busy(target, options)
    hang_up = time.perf_counter()
    _close(sockets)
    after = _wait_idle(target)
    idle_at = time.perf_counter()
    wasted = _wasted(target) - wasted_before

    sockets = _start_clients(target, options, "second")
    _wait_busy(target, options)
    _close(sockets)
    follow_up = _ttft(target, options, "follow-up")
    _wait_idle(target)
    return StormReport(
        clients=options.clients,
        kind=options.kind,
        running_before=before["num_running"],
        waiting_before=before["num_waiting"],
        idle_ms=(idle_at - hang_up) * 1000,
        steps_to_idle=after["step"] - before["step"],
        iterations_to_idle=after["iteration"] - before["iteration"],
        wasted_tokens=wasted,
        kv_used_blocks_after=after["kv_used_blocks"],
        lone_ttft_ms=lone * 1000,
        follow_up_ttft_ms=follow_up * 1000,
    )


def run_in_process(options: StormOptions) -> StormReport:
    """Start a server for `options.model` on a free port of this process and storm it."""
    import uvicorn

    from qwen3_asgi.app import create_app
    from qwen3_asgi.engine.engine import Engine

    with Engine(options.model) as engine:
        config = uvicorn.Config(
            create_app(engine), port=0, log_level="warning", lifespan="off", ws="none"
        )
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, name="storm server")
        thread.start()
        try:
            while not server.started:
                if not thread.is_alive():
                    raise ValueError("the server did not start")
                time.sleep(POLL_SECONDS)
            port = server.servers[0].sockets[0].getsockname()[1]
            return run_storm(f"http://127.0.0.1:{port}", options)
        finally:
            server.should_exit = True
            thread.join()


def _start_clients(target: Target, options: StormOptions, salt: str) -> list[socket.socket]:
    kinds = {"stream": [True], "plain": [False], "both": [True, False]}[options.kind]
    sockets = []
    for index in range(options.clients):
        words = " ".join(f"{salt}{index}x{word % 97}" for word in range(options.prompt_words))
        body = _body(options, words, options.max_tokens, stream=kinds[index % len(kinds)])
        sockets.append(target.send("POST", "/v1/completions", body))
    return sockets


def _body(options: StormOptions, prompt: str, max_tokens: int, *, stream: bool) -> dict[str, Any]:
    return {
        "model": options.model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": stream,
    }


def _close(sockets: list[socket.socket]) -> None:
    for connection in sockets:
        connection.close()


def _ttft(target: Target, options: StormOptions, prompt: str) -> float:
    begin = time.perf_counter()
    with target.send(
        "POST", "/v1/completions", _body(options, prompt, 4, stream=True)
    ) as connection:
        data = b""
        while b"data: " not in data:
            chunk = connection.recv(65536)
            if not chunk:
                raise ValueError(f"no token came: {data[:300]!r}")
            data += chunk
        first = time.perf_counter() - begin
        while connection.recv(65536):
            pass
    return first


def _wait_busy(target: Target, options: StormOptions) -> dict[str, Any]:
    def busy(load: dict[str, Any]) -> bool:
        live = load["num_running"] + load["num_waiting"]
        return bool(live >= options.clients and load["num_running"])

    message = "the clients were answered too fast: raise --max-tokens or --prompt-words"
    return _wait(target, busy, message)


def _wait_idle(target: Target) -> dict[str, Any]:
    def idle(load: dict[str, Any]) -> bool:
        return not (load["num_running"] or load["num_waiting"])

    return _wait(target, idle, f"the server was not idle after {WAIT_SECONDS:.0f} s")


def _wait(
    target: Target, holds: Callable[[dict[str, Any]], bool], otherwise: str
) -> dict[str, Any]:
    """The first load for which it holds."""
    deadline = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < deadline:
        load: dict[str, Any] = json.loads(target.get("/load"))
        if holds(load):
            return load
        time.sleep(POLL_SECONDS)
    raise ValueError(otherwise)


def _wasted(target: Target) -> int:
    total = 0.0
    for family in text_string_to_metric_families(target.get("/metrics").decode()):
        total += sum(
            sample.value
            for sample in family.samples
            if sample.name == "qwen3_asgi_wasted_tokens_total"
        )
    return int(total)
