"""What the scheduler itself costs: iterations and sweeps over an executor that computes nothing.

An iteration is timed whole, from the drain to the delivery, with one token for every active
request. A sweep is timed from the moment it looks for cancelled requests until it has dropped them.
Prompts differ in length, so that blocks fill up and are asked for in every iteration alike.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from qwen3_asgi.bench.figures import Spread, columns
from qwen3_asgi.bench.world import frozen
from qwen3_asgi.metrics import EngineMetrics
from qwen3_asgi.scheduler.loop import Scheduler
from qwen3_asgi.scheduler.plan import RequestId, SampledToken, StepResult
from qwen3_asgi.scheduler.request import Request

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from qwen3_asgi.scheduler.events import Event
    from qwen3_asgi.scheduler.executor import KVTiers, ModelExecutor
    from qwen3_asgi.scheduler.plan import StepPlan

BLOCK_SIZE = 16
PROMPT_TOKENS = 8  # and up to 15 more
SURVIVORS = 96
# Microseconds of wall and of CPU time.
Sample = tuple[float, float]


@dataclass(frozen=True, slots=True)
class SchedulerOptions:
    """`live` requests each, all of them active, and then with `max_active` active at most.

    Each round has `iterations` and `sweeps` of every scene, so that what slows the machine down for
    a while slows them all.
    """

    live: tuple[int, ...] = (1, 256, 1024, 4096)
    max_active: int = 256
    rounds: int = 5
    iterations: int = 40
    sweeps: int = 3


@dataclass(frozen=True, slots=True)
class Scene:
    """Who lives, and whether measurements are taken of it."""

    live: int
    active: int
    metrics: bool


@dataclass(frozen=True, slots=True)
class SchedulerReport:
    """One scene. `wall` and `cpu` are microseconds: of an iteration, or of a sweep of `dropped`."""

    kind: str
    live: int
    active: int
    metrics: bool
    dropped: int
    wall: Spread
    cpu: Spread


class NullExecutor:
    """A `ModelExecutor` that answers every row with the same token, without looking."""

    block_size = BLOCK_SIZE
    max_context_tokens = 1 << 20
    tiers: KVTiers | None = None

    def __init__(self, num_kv_blocks: int, request_ids: Sequence[RequestId]) -> None:
        self.num_kv_blocks = num_kv_blocks
        token = SampledToken(1)
        self._result = StepResult(dict.fromkeys(request_ids, token))

    def step(self, plan: StepPlan) -> StepResult:
        return self._result

    def on_landed(self, wake: Callable[[], None]) -> None: ...

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None: ...

    def load_adapter(self, name: str, adapter: object) -> None: ...

    def unload_adapter(self, name: str) -> None: ...

    def drop_request(self, request_id: RequestId) -> None: ...

    def close(self) -> None: ...


if TYPE_CHECKING:
    _conforms: type[ModelExecutor] = NullExecutor


class NullSink:
    def deliver(self, events: Sequence[Event]) -> None: ...


class Stopwatch:
    """Wall and CPU time at the last begin of each phase; the `trace=` of a scheduler."""

    def __init__(self) -> None:
        self.at: dict[str, tuple[int, int]] = {}

    def __call__(self, phase: str) -> None:
        self.at[phase] = _now()

    def between(self, begin: str, end: str) -> Sample:
        return _since(self.at[begin], self.at[end])


def run_scheduler(options: SchedulerOptions) -> list[SchedulerReport]:
    """One report per scene: iterations, then sweeps of nearly all of the largest number."""
    largest = max(options.live)
    swept = [
        Scene(largest, active, metrics)
        for active in (min(options.max_active, largest), largest)
        for metrics in (False, True)
    ]
    iterations: dict[Scene, list[Sample]] = {scene: [] for scene in _scenes(options)}
    sweeps: dict[Scene, list[Sample]] = {scene: [] for scene in swept}
    for _ in range(options.rounds):
        for scene, samples in iterations.items():
            samples += _iterations(scene, options.iterations)
        for scene, samples in sweeps.items():
            samples += _sweeps(scene, options.sweeps)
    reports = [_report("iteration", scene, 0, samples) for scene, samples in iterations.items()]
    dropped = _dropped(largest)
    return reports + [_report("sweep", scene, dropped, found) for scene, found in sweeps.items()]


def to_json(reports: list[SchedulerReport]) -> str:
    return json.dumps({"unit": "microseconds", "rows": [asdict(report) for report in reports]})


def table(reports: list[SchedulerReport]) -> str:
    """The reports as lines for a person."""
    rows = [["µs", "metrics", "median", "p90", "min", "CPU", "CPU p90", "CPU min", "per request"]]
    for report in reports:
        waiting = report.live - report.active
        name = f"{report.active} active, {waiting} waiting"
        if report.kind == "sweep":
            name = f"sweep of {report.dropped}: {name}"
        wall, cpu = report.wall, report.cpu
        figures = [wall.median, wall.p90, wall.min, cpu.median, cpu.p90, cpu.min]
        each = cpu.median / (report.dropped or report.active)
        rows.append(
            [
                name,
                "on" if report.metrics else "off",
                *(f"{figure:,.0f}" for figure in figures),
                f"{each:.2f}",
            ]
        )
    return columns(rows)


def _scenes(options: SchedulerOptions) -> Iterator[Scene]:
    for metrics in (False, True):
        for live in options.live:
            yield Scene(live, live, metrics)
        for live in options.live:
            if live > options.max_active:
                yield Scene(live, options.max_active, metrics)


def _iterations(scene: Scene, count: int) -> list[Sample]:
    scheduler, _ = _warm(scene, count + 8)
    samples: list[Sample] = []
    with frozen():
        for _ in range(count):
            begin = _now()
            scheduler.iterate()
            samples.append(_since(begin, _now()))
    load = scheduler.load
    if (load.num_running, load.num_waiting) != (scene.active, scene.live - scene.active):
        raise RuntimeError(f"the scene is not as it was to be: {load}")
    return samples


def _dropped(live: int) -> int:
    return max(1, live - SURVIVORS)


def _sweeps(scene: Scene, count: int) -> list[Sample]:
    samples: list[Sample] = []
    dropped = _dropped(scene.live)
    for _ in range(count):
        watch = Stopwatch()
        scheduler, requests = _warm(scene, 8, trace=watch)
        for request in requests[:dropped]:
            scheduler.cancel(request.id)
        with frozen():
            scheduler.iterate()
        samples.append(watch.between("sweep", "publish"))
        load = scheduler.load
        if load.num_running + load.num_waiting != scene.live - dropped:
            raise RuntimeError(f"the sweep was not as it was to be: {load}")
    return samples


def _warm(
    scene: Scene, iterations: int, trace: Stopwatch | None = None
) -> tuple[Scheduler, list[Request]]:
    """A scheduler whose active requests decode, with room for so many iterations."""
    requests = [
        Request(f"request-{i}", [i] * (PROMPT_TOKENS + i % BLOCK_SIZE)) for i in range(scene.live)
    ]
    each = (PROMPT_TOKENS + BLOCK_SIZE + iterations) // BLOCK_SIZE + 3
    executor = NullExecutor(scene.live * each, [request.id for request in requests])
    scheduler = Scheduler(
        executor,
        NullSink(),
        max_batch=scene.active,
        max_prefill_tokens=scene.live * PROMPT_TOKENS * 4,
        observer=EngineMetrics("null", "0") if scene.metrics else None,
        trace=trace,
    )
    scheduler.submit(*requests)
    for _ in range(4):
        scheduler.iterate()
    return scheduler, requests


def _report(kind: str, scene: Scene, dropped: int, samples: list[Sample]) -> SchedulerReport:
    return SchedulerReport(
        kind,
        scene.live,
        scene.active,
        scene.metrics,
        dropped,
        wall=Spread.of(wall for wall, _ in samples),
        cpu=Spread.of(cpu for _, cpu in samples),
    )


def _now() -> tuple[int, int]:
    return time.perf_counter_ns(), time.thread_time_ns()


def _since(begin: tuple[int, int], end: tuple[int, int]) -> Sample:
    return (end[0] - begin[0]) / 1000, (end[1] - begin[1]) / 1000
