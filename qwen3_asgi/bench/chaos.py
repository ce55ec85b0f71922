"""Chaos: clients that come and leave at random, steps that fail, adapters that change, a KV pool
that is far too small, copies to and from the tiers; and in the end, what must have held all along.

Every request has one terminal event. Whoever stayed got what an undisturbed engine says. Nothing is
left: no request, block, task, thread or file descriptor, and memory does not grow.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import json
import os
import random
import statistics
import tempfile
import threading
import time
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.responses import JSONResponse
from starlette.routing import Mount, Route

from qwen3_asgi.app import create_app
from qwen3_asgi.bench.chaos_clients import DOORS, Clients, Tally, error_of
from qwen3_asgi.bench.chaos_world import ADAPTERS, Jobs, Ledger, World
from qwen3_asgi.bench.figures import pairs
from qwen3_asgi.bench.storm_server import serve_here
from qwen3_asgi.bench.wire import Probe, Target
from qwen3_asgi.config import SamplingParams
from qwen3_asgi.errors import ClientDisconnected, Qwen3Error
from qwen3_asgi.middleware import DisconnectMiddleware

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from starlette.requests import Request
    from starlette.responses import Response

    from qwen3_asgi.engine.engine import Engine

SAMPLE_SECONDS = 1.0
SETTLE_SECONDS = 10.0
POLL_SECONDS = 0.01
# Memory is judged over the rest: caches, pools and interned values fill at first.
WARM_UP_PART = 0.25
# Fewer samples than this say nothing about a slope.
LEAST_SAMPLES = 40
BATCHES = 10
T_95 = 2.306  # Student's t for a 95 % interval of a slope through ten points
# A slope that comes to less than this part of the memory over the run is no leak that matters.
HARMLESS_GROWTH = 0.01
# What libraries open once and keep.
SPARE_DESCRIPTORS = 4


@dataclass(frozen=True, slots=True)
class ChaosOptions:
    """`leave` is the part of the requests whose client leaves; `fail_every` is in steps."""

    model: str = "fake"
    minutes: float = 20.0
    clients: int = 36
    leave: float = 0.5
    fail_every: int = 200
    prompts: int = 24
    overlap: bool = False
    pipelined: bool = False
    seed: int = 0


class Slope(NamedTuple):
    """KiB per minute, with the half width of its 95 % interval."""

    kib_per_minute: float
    margin: float
    growing: bool


@dataclass(slots=True)
class ChaosReport:
    """`violations` and `left` are empty if all held."""

    options: ChaosOptions
    seconds: float = 0.0
    submitted: int = 0
    ends: dict[str, int] = field(default_factory=dict)
    outcomes: dict[str, dict[str, int]] = field(default_factory=dict)
    steps: int = 0
    failed_steps: int = 0
    adapter_commands: int = 0
    counters: dict[str, int] = field(default_factory=dict)
    rss_mib: tuple[float, float] = (0.0, 0.0)
    rss_slope: Slope | None = None
    violations: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        growing = self.rss_slope is not None and self.rss_slope.growing
        return not self.violations and not self.left and not growing

    def to_json(self) -> str:
        return json.dumps({**asdict(self), "ok": self.ok})


def table(report: ChaosReport) -> str:
    """The report as lines for a person."""
    options, slope = report.options, report.rss_slope
    kinds = ("right", "left", "failed", "late", "refused")
    totals = {kind: sum(each.get(kind, 0) for each in report.outcomes.values()) for kind in kinds}
    rows = [
        ("ran", f"{report.seconds:.0f} s, {options.clients} clients, {options.model}"),
        ("overlap", "yes" if options.overlap else "no"),
        ("pipelined decode", "yes" if options.pipelined else "no"),
        ("requests", f"{report.submitted}, one end each: {_words(report.ends)}"),
        ("answered as undisturbed", f"{totals['right']}"),
        ("left by their client", f"{totals['left']}"),
        ("failed with their step", f"{totals['failed']}"),
        ("past their deadline", f"{totals['late']}"),
        ("refused (adapter unloaded)", f"{totals['refused']}"),
        ("forward passes", f"{report.steps}, {report.failed_steps} of them made to fail"),
        ("adapter commands", f"{report.adapter_commands}"),
        *((name.replace("_", " "), f"{count}") for name, count in report.counters.items()),
        ("resident memory", f"{report.rss_mib[0]:.1f} to {report.rss_mib[1]:.1f} MiB"),
        (
            "its slope after warm-up",
            "too short a run to say"
            if slope is None
            else f"{slope.kib_per_minute:+.1f} ± {slope.margin:.1f} KiB/min (95 %)",
        ),
        ("left behind", "; ".join(report.left) or "nothing"),
        ("violations", "; ".join(report.violations[:5]) or "none"),
    ]
    return pairs(rows)


def _words(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))


def run_chaos(options: ChaosOptions) -> ChaosReport:
    """Run it for `options.minutes`, after an undisturbed run that gives the right answers.

    Raises:
        ValueError: no client for each door, or nothing to do.
    """
    if options.clients < len(DOORS) or options.fail_every < 2 or options.prompts < 1:
        raise ValueError(f"at least {len(DOORS)} clients, 2 steps and 1 prompt are needed")
    report = ChaosReport(options)
    gc.collect()
    threads, descriptors = set(threading.enumerate()), _descriptors()
    with tempfile.TemporaryDirectory(prefix="chaos") as folder:
        calm = World(options.model, Path(folder))
        with calm.engine as engine:
            calm.load_adapters()
            jobs = Jobs(engine, random.Random(options.seed), options.prompts)
        _run(options, jobs, Path(folder), report)
    gc.collect()
    _wait(lambda: not _new_threads(threads))
    report.left += [f"thread {name}" for name in _new_threads(threads)]
    # Sockets that were closed are collected with their transports.
    _wait(lambda: _descriptors() <= descriptors + SPARE_DESCRIPTORS)
    if (now := _descriptors()) > descriptors + SPARE_DESCRIPTORS:
        report.left.append(f"{now - descriptors} file descriptors")
    return report


def _run(options: ChaosOptions, jobs: Jobs, folder: Path, report: ChaosReport) -> None:
    world = World(
        options.model,
        folder,
        fail_every=options.fail_every,
        overlap=options.overlap,
        pipelined=options.pipelined,
    )
    engine = world.engine
    registry = CollectorRegistry()
    engine.metrics(registry)
    samples: list[float] = []
    trim_heap = _heap_trimmer()
    with engine, serve_here(_host(engine)) as url:
        ledger = Ledger(engine)
        world.load_adapters()
        if 60 * options.minutes >= LEAST_SAMPLES * SAMPLE_SECONDS:
            jobs.warm(engine)
        target = Target.parse(url)
        with closing(Probe(target)) as probe:
            tasks = json.loads(probe.get("/tasks"))
            clients = Clients(
                world, jobs, target, leave=options.leave, count=options.clients, seed=options.seed
            )
            begin = time.monotonic()
            clients.start()
            try:
                while (left := begin + 60 * options.minutes - time.monotonic()) > 0:
                    time.sleep(min(SAMPLE_SECONDS, left))
                    trim_heap()
                    samples.append(_rss_kib())
                    if engine.state != "ready":
                        clients.tally.violate(f"the engine is {engine.state}")
                        break
            finally:
                clients.stop()
            report.seconds = time.monotonic() - begin
            _wait(lambda: not engine.live_requests and engine.load().idle)
            load = engine.load()
            report.left += [f"request {name}" for name in sorted(ledger.live)]
            if engine.live_requests or not load.idle or load.kv_used_blocks:
                report.left.append(f"{engine.live_requests} live requests, {load}")
            _wait(lambda: json.loads(probe.get("/tasks")) <= tasks)
            if (now := json.loads(probe.get("/tasks"))) > tasks:
                report.left.append(f"{now - tasks} tasks of the server's loop")
    executor = world.executor
    if executor is None:  # unreachable: the engine was started
        raise ValueError("the engine never loaded its model")
    tally = clients.tally
    report.submitted, report.ends = ledger.submitted, dict(ledger.ends)
    report.outcomes = _by_door(tally)
    report.steps, report.failed_steps = executor.steps, executor.failures
    report.adapter_commands = tally.adapter_commands
    report.counters = _counters(registry)
    report.violations = tally.violations + ledger.wrong
    if samples:
        report.rss_mib = (round(samples[0] / 1024, 1), round(samples[-1] / 1024, 1))
        report.rss_slope = slope_of(samples[int(len(samples) * WARM_UP_PART) :])


def slope_of(samples: Sequence[float]) -> Slope | None:
    """The trend of samples in KiB, one a second; None if there are too few.

    Neighbouring samples depend on each other, so the interval is that of the means of ten batches.
    """
    if len(samples) < LEAST_SAMPLES:
        return None
    size = len(samples) // BATCHES
    means = [statistics.fmean(samples[i * size : (i + 1) * size]) for i in range(BATCHES)]
    minutes = [i * size * SAMPLE_SECONDS / 60 for i in range(BATCHES)]
    slope, intercept = statistics.linear_regression(minutes, means)
    rest = sum((y - intercept - slope * x) ** 2 for x, y in zip(minutes, means, strict=True))
    spread = sum((x - statistics.fmean(minutes)) ** 2 for x in minutes)
    margin = T_95 * (rest / (BATCHES - 2) / spread) ** 0.5
    growth = slope * len(samples) * SAMPLE_SECONDS / 60
    growing = slope > margin and growth > HARMLESS_GROWTH * statistics.fmean(means)
    return Slope(round(slope, 2), round(margin, 2), growing)


def _host(engine: Engine) -> Starlette:
    async def handler(request: Request) -> Response:
        asked = await request.json()
        params = SamplingParams(
            max_tokens=asked["max_tokens"], temperature=0.0, ignore_eos=True, n=asked["n"]
        )
        try:
            output = await engine.generate(
                prompt_token_ids=asked["prompt"],
                params=params,
                adapter=asked["model"] if asked["model"] in ADAPTERS else None,
                timeout=asked.get("timeout"),
            )
        except ClientDisconnected:
            raise
        except Qwen3Error as error:
            return JSONResponse({"error": error_of(error)}, 500)
        return JSONResponse({"token_ids": [list(each.token_ids) for each in output.outputs]})

    async def tasks(request: Request) -> Response:
        return JSONResponse(len(asyncio.all_tasks()))

    return Starlette(
        routes=[
            Route("/handler", handler, methods=["POST"]),
            Route("/tasks", tasks),
            Mount("/llm", create_app(engine)),
        ],
        middleware=[Middleware(DisconnectMiddleware)],
    )


def _by_door(tally: Tally) -> dict[str, dict[str, int]]:
    outcomes: dict[str, dict[str, int]] = {door: {} for door in DOORS}
    for (door, outcome), count in tally.counts.items():
        outcomes[door][outcome] = count
    return outcomes


def _counters(registry: CollectorRegistry) -> dict[str, int]:
    names = {
        "vllm:num_preemptions_total": "preemptions",
        "vllm:external_prefix_cache_hits_total": "tokens_loaded_from_the_tiers",
        "qwen3_asgi_wasted_tokens_total": "tokens_wasted_on_the_gone",
    }
    found: dict[str, int] = {}
    for family in registry.collect():
        for sample in family.samples:
            if sample.name == "qwen3_asgi_requests_cancelled_total":
                found[f"cancelled_{sample.labels['state']}"] = int(sample.value)
            elif sample.name in names:
                found[names[sample.name]] = int(sample.value)
    return dict(sorted(found.items()))


def _wait(reached: Callable[[], bool]) -> None:
    """Until it is so, or for as long as it may take."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while not reached() and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)


def _new_threads(before: set[threading.Thread]) -> list[str]:
    from qwen3_asgi.testing.checks import POOLED

    return [
        thread.name
        for thread in threading.enumerate()
        if thread not in before and not thread.name.startswith(POOLED)
    ]


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def _heap_trimmer() -> Callable[[], object]:
    """Gives freed memory back to the system, so that what the C allocator keeps is no growth."""
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):  # not glibc
        return lambda: None
    return lambda: trim(0)


def _rss_kib() -> float:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1024
