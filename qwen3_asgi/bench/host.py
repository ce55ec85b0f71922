"""Does the host stay responsive? `/ping` and the event loop's lag, idle and while generations run.

Three processes: the host with the engine, a client that keeps N streams running, and this one that
asks `/ping` now and then. So the load's client costs the host no time on its loop; but all share
the machine's cores, and where these are few that is part of the figure. Idle and busy phases
alternate.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from qwen3_asgi.bench.crowd import Crowd
from qwen3_asgi.bench.figures import columns, quantile
from qwen3_asgi.bench.host_app import HostSettings, host_process
from qwen3_asgi.bench.wire import Probe, Target

if TYPE_CHECKING:
    from collections.abc import Iterator

PING_EVERY_SECONDS = 0.005
BUSY_SECONDS = 120.0
PROMPT_WORDS = 40
READ_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class HostOptions:
    """`rounds` of an idle and a busy phase, `seconds` each, with `clients` streams when busy."""

    settings: HostSettings = field(default_factory=HostSettings)
    clients: int = 32
    max_tokens: int = 256
    seconds: float = 3.0
    rounds: int = 3


@dataclass(frozen=True, slots=True)
class Delays:
    """Milliseconds over all phases of a kind."""

    p50: float
    p99: float
    max: float
    samples: int

    @classmethod
    def of(cls, samples: list[float]) -> Delays:
        """
        Raises:
            ValueError: no samples.
        """
        if not samples:
            raise ValueError("nothing was measured: make the phases longer")
        ordered = sorted(samples)
        return cls(
            p50=round(quantile(ordered, 0.5), 3),
            p99=round(quantile(ordered, 0.99), 3),
            max=round(ordered[-1], 3),
            samples=len(ordered),
        )


@dataclass(frozen=True, slots=True)
class HostReport:
    """`lag` is how late the loop woke a task, `cpu` what its thread had computed meanwhile."""

    options: HostOptions
    idle_ping: Delays
    busy_ping: Delays
    idle_lag: Delays
    busy_lag: Delays
    idle_cpu: Delays
    busy_cpu: Delays
    steps_per_second: float
    bytes_per_second: float

    @property
    def ping_p99_ratio(self) -> float:
        return round(self.busy_ping.p99 / self.idle_ping.p99, 2)

    @property
    def lag_p99_ratio(self) -> float:
        return round(self.busy_lag.p99 / self.idle_lag.p99, 2)

    def to_json(self) -> str:
        ratios = {"ping_p99_ratio": self.ping_p99_ratio, "lag_p99_ratio": self.lag_p99_ratio}
        return json.dumps({**asdict(self), **ratios})


def table(report: HostReport) -> str:
    """The report as lines for a person."""
    rows = [["milliseconds", "p50", "p99", "max", "samples"]]
    for name in ("idle_ping", "busy_ping", "idle_lag", "busy_lag", "idle_cpu", "busy_cpu"):
        delays: Delays = getattr(report, name)
        figures = [f"{figure:.2f}" for figure in (delays.p50, delays.p99, delays.max)]
        state, _, what = name.partition("_")
        title = {"ping": "/ping", "lag": "loop lag", "cpu": "loop CPU meanwhile"}[what]
        rows.append([f"{title}, {state}", *figures, str(delays.samples)])
    return (
        f"{columns(rows)}\n\nbusy / idle at p99: /ping {report.ping_p99_ratio:.1f},"
        f" loop lag {report.lag_p99_ratio:.1f}\n"
        f"busy: {report.options.clients} streams, {report.steps_per_second:.0f} steps/s,"
        f" {report.bytes_per_second / 1000:,.0f} kB/s of events"
    )


def run_host(options: HostOptions) -> HostReport:
    """Start a host and measure it.

    Raises:
        ValueError: it did not start, or never got busy.
    """
    idle, busy = _Samples(), _Samples()
    steps = size = 0
    seconds = 0.0
    with host_process(options.settings) as url, closing(Probe(Target.parse(url))) as probe:
        _phase(probe, 0.2, _Samples())  # the first requests of a process are its slowest
        for _ in range(options.rounds):
            _phase(probe, options.seconds, idle)
            with _load(url, options) as load:
                _wait_running(probe, options.clients)
                before, begin = _step(probe), time.perf_counter()
                _phase(probe, options.seconds, busy)
                steps += _step(probe) - before
                seconds += time.perf_counter() - begin
            size += load["bytes_per_second"]
            _wait_running(probe, 0)
    return HostReport(
        options,
        Delays.of(idle.ping),
        Delays.of(busy.ping),
        Delays.of(idle.lag),
        Delays.of(busy.lag),
        Delays.of(idle.cpu),
        Delays.of(busy.cpu),
        steps_per_second=round(steps / seconds, 1),
        bytes_per_second=round(size / options.rounds, 1),
    )


@dataclass(slots=True)
class _Samples:
    ping: list[float] = field(default_factory=list)
    lag: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)


def _phase(probe: Probe, seconds: float, samples: _Samples) -> None:
    """Add the milliseconds of every ping, and of what the host's loop noted meanwhile."""
    probe.get("/lag")
    end = time.perf_counter() + seconds
    while (begin := time.perf_counter()) < end:
        probe.get("/ping")
        samples.ping.append((time.perf_counter() - begin) * 1000)
        time.sleep(PING_EVERY_SECONDS)
    for late, cpu in json.loads(probe.get("/lag")):
        samples.lag.append(late)
        samples.cpu.append(cpu)


def _step(probe: Probe) -> int:
    return int(json.loads(probe.get("/llm/load"))["step"])


def _wait_running(probe: Probe, clients: int) -> None:
    deadline = time.monotonic() + BUSY_SECONDS
    while json.loads(probe.get("/llm/load"))["num_running"] != clients:
        if time.monotonic() > deadline:
            raise ValueError(f"{clients} generations were never running at once")
        time.sleep(PING_EVERY_SECONDS)


@contextmanager
def _load(url: str, options: HostOptions) -> Iterator[dict[str, Any]]:
    """A process that keeps the streams running until the block ends; then what it has counted."""
    wanted = {
        "url": f"{url}/llm",
        "model": options.settings.model,
        "clients": options.clients,
        "max_tokens": options.max_tokens,
    }
    arguments = [sys.executable, "-m", __name__, json.dumps(wanted)]
    counted: dict[str, Any] = {}
    with subprocess.Popen(
        arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield counted
            answer, _ = process.communicate()  # closes its stdin, and it ends
            counted.update(json.loads(answer or '{"bytes_per_second": 0}'))
        finally:
            process.kill()


def main(argument: str) -> None:
    """The load process: streams until stdin ends."""
    wanted = json.loads(argument)
    target = Target.parse(wanted["url"])

    def body(index: int) -> dict[str, Any]:
        words = " ".join(f"c{index}w{word % 97}" for word in range(PROMPT_WORDS))
        return {
            "model": wanted["model"],
            "prompt": words,
            "max_tokens": wanted["max_tokens"],
            "ignore_eos": True,
            "stream": True,
        }

    begin = time.perf_counter()
    with closing(Crowd(target, [])) as crowd:
        asked = 0
        crowd.stop_at(sys.stdin)
        while not crowd.stopped:
            while len(crowd) < wanted["clients"]:
                crowd.add(target, body(asked))
                asked += 1
            crowd.read(READ_SECONDS)
        rate = crowd.bytes_read / (time.perf_counter() - begin)
    print(json.dumps({"bytes_per_second": round(rate, 1)}))


if __name__ == "__main__":
    main(sys.argv[1])
