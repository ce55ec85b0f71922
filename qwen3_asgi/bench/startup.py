"""From the start of a process to a server that answers: several fresh processes, stage by stage.

The engine says on a logger when each stage of its start begins; the child (`startup_child`) adds
its own imports and the server. All times are of the system's monotonic clock, which the processes
share.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

from qwen3_asgi.bench.figures import columns
from qwen3_asgi.bench.wire import Target

# The stages in order, each with what it is. A stage ends where the next one begins.
STAGES = {
    "interpreter": "interpreter",
    "package": "import of the package, without torch",
    "server": "import of the server, and the app",
    "torch": "import of torch and of the model's code",
    "tokenizer": "tokenizer",
    "weights": "weights",
    "kv pool": "KV pool",
    "model": "kernels, tables, sampler, host tiers",
    "ready": "scheduler to ready, server to listening",
}


@dataclass(frozen=True, slots=True)
class StartupOptions:
    """`engine` has fields of `EngineConfig`; `repeat` processes are started in turn."""

    model: str = "tiny"
    engine: dict[str, Any] = field(default_factory=dict)
    repeat: int = 5


@dataclass(frozen=True, slots=True)
class Start:
    """One process, in milliseconds. `stages` sum to `total_ms`, the time until it listened;
    `first_token_ms` is what the first request then waited for its first token."""

    stages: dict[str, float]
    total_ms: float
    first_token_ms: float


@dataclass(frozen=True, slots=True)
class StartupReport:
    """All starts, and the medians of each figure."""

    options: StartupOptions
    starts: tuple[Start, ...]

    def median(self, stage: str) -> float:
        return statistics.median(start.stages[stage] for start in self.starts)

    @property
    def total_ms(self) -> float:
        return statistics.median(start.total_ms for start in self.starts)

    @property
    def first_token_ms(self) -> float:
        return statistics.median(start.first_token_ms for start in self.starts)

    def to_json(self) -> str:
        stages = {stage: round(self.median(stage), 3) for stage in STAGES}
        medians = {"total_ms": self.total_ms, "first_token_ms": self.first_token_ms}
        return json.dumps({**asdict(self), "stages": stages, **medians})


def table(report: StartupReport) -> str:
    """The report as lines for a person."""
    rows = [[f"start of {report.options.model}, median of {len(report.starts)}", "ms", "share"]]
    for stage, words in STAGES.items():
        at = report.median(stage)
        rows.append([words, f"{at:,.0f}", f"{at / report.total_ms:.0%}"])
    rows.append(["process start to listening", f"{report.total_ms:,.0f}", ""])
    rows.append(["first token of the first request, then", f"{report.first_token_ms:,.0f}", ""])
    return columns(rows)


def run_startup(options: StartupOptions) -> StartupReport:
    """
    Raises:
        ValueError: nothing to do, or a process that did not start.
    """
    if options.repeat < 1:
        raise ValueError(f"--repeat must be at least 1, got {options.repeat}")
    return StartupReport(options, tuple(_start(options) for _ in range(options.repeat)))


def _start(options: StartupOptions) -> Start:
    arguments = json.dumps({"model": options.model, "engine": options.engine})
    begin = time.monotonic()
    with subprocess.Popen(
        [sys.executable, "-m", "qwen3_asgi.bench.startup_child", arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            said = process.stdout.readline() if process.stdout else ""
            if not said:
                raise ValueError("the process did not start; its own words are above")
            told = json.loads(said)
            first = _first_token(Target("127.0.0.1", told["port"], ""), options.model)
        finally:
            process.kill()
    return Start(*_stages(begin, told["marks"], told["listening"]), first * 1000)


def _stages(
    begin: float, marks: list[tuple[str, float]], listening: float
) -> tuple[dict[str, float], float]:
    """Milliseconds of each stage, and of all.

    Raises:
        ValueError: a stage is missing, or there is one that nobody knows.
    """
    names = ["interpreter", *(name for name, _ in marks)]
    if names != list(STAGES):
        raise ValueError(f"the start told of the stages {names}, expected {list(STAGES)}")
    moments = [begin, *(at for _, at in marks), listening]
    spans = pairwise(moments)
    stages = {
        name: (after - before) * 1000 for name, (before, after) in zip(names, spans, strict=True)
    }
    return stages, (listening - begin) * 1000


def _first_token(target: Target, model: str) -> float:
    body = {"model": model, "prompt": "Hello", "max_tokens": 1, "stream": True}
    begin = time.monotonic()
    with target.send("POST", "/v1/completions", body) as connection:
        data = b""
        while b"data: " not in data:
            if not (chunk := connection.recv(65536)):
                raise ValueError(f"no token came: {data[:300]!r}")
            data += chunk
        return time.monotonic() - begin
