"""How evenly tokens come to those who decode while long prompts arrive, with and without overlap.

Eight clients decode, first undisturbed; then one long prompt after the other comes in. The bound is
twice the undisturbed median plus one chunk: a client should never wait for more than the one chunk
of a prompt that its step was planned with. A chunk is timed before, alone: the last ones of a
prompt take longest, for they look back at all the others.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from qwen3_asgi.bench.figures import columns, quantile
from qwen3_asgi.bench.world import long_model, running

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from qwen3_asgi.bench.world import World
    from qwen3_asgi.scheduler.executor import ModelExecutor
    from qwen3_asgi.scheduler.trace import Trace

CLIENT_PROMPT_TOKENS = 32
WARM_UP_TOKENS = 20


@dataclass(frozen=True, slots=True)
class ItlOptions:
    """`prompts` prompts of `prompt_tokens` each, in chunks of `chunk_tokens`."""

    clients: int = 8
    prompt_tokens: int = 16_384
    chunk_tokens: int = 512
    prompts: int = 3
    undisturbed_tokens: int = 300
    overlap: tuple[bool, ...] = (False, True)
    device: str = "cpu"


class Latency(NamedTuple):
    """Milliseconds from one token of a client to its next."""

    p50: float
    p99: float
    max: float
    tokens: int


@dataclass(frozen=True, slots=True)
class ItlReport:
    """Milliseconds. `chunk` is the median of all chunks alone, `longest_chunk` the longest."""

    overlap: bool
    undisturbed: Latency
    arriving: Latency
    chunk: float
    longest_chunk: float
    bound: float
    prompt_seconds: float

    @property
    def ratio(self) -> float:
        """How much of the bound the 99th percentile takes up."""
        return self.arriving.p99 / self.bound


class Measured(NamedTuple):
    """A report, and the record of the scheduler behind it."""

    report: ItlReport
    trace: Trace


def run_itl(options: ItlOptions) -> list[Measured]:
    """One for each setting of `overlap`, on the same model."""
    with long_model(device=options.device) as executor:
        return [_measure(executor, options, overlap=overlap) for overlap in options.overlap]


def to_json(measured: Sequence[Measured]) -> str:
    rows = [
        {**asdict(report), "ratio": report.ratio}
        | {name: getattr(report, name)._asdict() for name in ("undisturbed", "arriving")}
        for report, _ in measured
    ]
    return json.dumps({"unit": "milliseconds", "rows": rows})


def table(measured: Sequence[Measured]) -> str:
    """The reports as lines for a person."""
    rows = [["ms between tokens", *("without overlap", "with overlap")]]
    reports = {report.overlap: report for report, _ in measured}
    order = [reports.get(False), reports.get(True)]

    def add(name: str, *cells: str | None) -> None:
        rows.append([name, *(cell or "" for cell in cells)])

    def figures(name: str, of: str) -> None:
        add(name, *(None if r is None else _path(r, of) for r in order))

    figures("undisturbed, p50", "undisturbed.p50")
    figures("undisturbed, p99", "undisturbed.p99")
    figures("prompts arriving, p50", "arriving.p50")
    figures("prompts arriving, p99", "arriving.p99")
    figures("prompts arriving, most", "arriving.max")
    figures("a chunk alone, median", "chunk")
    figures("the longest chunk alone", "longest_chunk")
    figures("bound: 2 x undisturbed p50 + longest chunk", "bound")
    figures("p99 / bound", "ratio")
    figures("seconds until a prompt's first token", "prompt_seconds")
    return columns(rows)


def _path(report: ItlReport, path: str) -> str:
    value: object = report
    for name in path.split("."):
        value = getattr(value, name)
    return f"{value:.2f}"


def _measure(executor: ModelExecutor, options: ItlOptions, *, overlap: bool) -> Measured:
    names = [f"client {i}" for i in range(options.clients)]
    with running(
        executor,
        overlap=overlap,
        chunk_tokens=options.chunk_tokens,
        max_batch=options.clients + 1,
    ) as world:
        clients = world.clients
        chunks = _chunks_alone(world, options)
        for name in names:
            world.submit(name, CLIENT_PROMPT_TOKENS)
        clients.wait_tokens(names, WARM_UP_TOKENS)
        before = {name: clients.count(name) for name in names}
        clients.wait_tokens(names, options.undisturbed_tokens)
        between = {name: clients.count(name) for name in names}
        seconds = [_arrive(world, f"prompt {i}", options) for i in range(options.prompts)]
        after = {name: clients.count(name) for name in names}
        times = {name: list(clients.times[name]) for name in names}
        for name in names:
            world.hang_up(name)
        clients.wait_end(*names)
    undisturbed = _latency(times[name][before[name] - 1 : between[name]] for name in names)
    arriving = _latency(times[name][between[name] - 1 : after[name]] for name in names)
    chunks.sort()
    longest = chunks[-1]
    report = ItlReport(
        overlap,
        undisturbed,
        arriving,
        chunk=round(quantile(chunks, 0.5), 3),
        longest_chunk=round(longest, 3),
        bound=round(2 * undisturbed.p50 + longest, 3),
        prompt_seconds=round(quantile(sorted(seconds), 0.5), 3),
    )
    return Measured(report, world.trace.read())


def _chunks_alone(world: World, options: ItlOptions) -> list[float]:
    """Milliseconds of each full chunk, with nobody else there; of as many prompts as come later."""
    for i in range(options.prompts):
        _arrive(world, f"alone {i}", options)
    steps = [step for each in world.trace.read().iterations for step in each.steps]
    return [
        (step.end - step.begin) * 1000 for step in steps if step.num_tokens == options.chunk_tokens
    ]


def _arrive(world: World, name: str, options: ItlOptions) -> float:
    """A long prompt, from its submit to its only token; in seconds."""
    world.submit(name, options.prompt_tokens, max_tokens=1)
    world.clients.wait_end(name)
    submitted = next(mark.at for mark in world.trace.read().marks if mark.request == name)
    return world.clients.times[name][0] - submitted


def _latency(series: Iterable[Sequence[float]]) -> Latency:
    gaps = sorted((after - before) * 1000 for times in series for before, after in pairwise(times))
    return Latency(
        round(quantile(gaps, 0.5), 3),
        round(quantile(gaps, 0.99), 3),
        round(gaps[-1], 3),
        len(gaps),
    )
