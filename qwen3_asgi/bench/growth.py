"""How the cost of a token grows with clients and context: decode steps at every point of a grid.

Steps of the real executor, in this process and without a server, over a KV pool filled with random
values: no prompt is computed, so that long contexts cost no more than their own steps. What the
scheduler and the delivery add is timed on an executor that computes nothing, as in `bench.step`.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from qwen3_asgi.bench.chart import Series, line_chart
from qwen3_asgi.bench.figures import columns
from qwen3_asgi.bench.step_scheduling import scheduling_seconds
from qwen3_asgi.config import EngineConfig
from qwen3_asgi.engine.loading import load_model


class Measured(Protocol):
    """What is asked of `model.stepping.Bench`, which needs torch."""

    @property
    def device(self) -> str: ...

    @property
    def dtype(self) -> str: ...

    def probe(self) -> tuple[float, float]: ...

    def decode_made_up(self, batch: int, context: int, steps: int) -> list[float]: ...

    def decode_needs(self, batch: int, context: int) -> tuple[int, int]: ...


@dataclass(frozen=True, slots=True)
class GrowthOptions:
    """Every number of clients at every context (tokens a row attends to, its own included).

    `engine` has fields of `EngineConfig`; without `num_kv_blocks` the pool takes what the engine
    would take for the largest number of clients.
    """

    model: str = "tiny"
    engine: dict[str, Any] = field(default_factory=dict)
    clients: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256)
    contexts: tuple[int, ...] = (128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
    steps: int = 5


@dataclass(frozen=True, slots=True)
class GrowthPoint:
    """Median milliseconds of a step: the model's part, and what scheduling and delivery add.

    `floor_ms` is what the bytes that must be read or the operations that must be done take at the
    limits measured in the same run, whichever is more; `bound` says which.
    """

    clients: int
    context: int
    model_ms: float
    scheduling_ms: float
    floor_ms: float
    bound: str

    @property
    def tokens_per_second(self) -> float:
        return round(self.clients / (self.model_ms + self.scheduling_ms) * 1000, 3)


@dataclass(frozen=True, slots=True)
class Skipped:
    """A point that was not measured, and why."""

    clients: int
    context: int
    reason: str


@dataclass(frozen=True, slots=True)
class GrowthReport:
    options: GrowthOptions
    device: str
    dtype: str
    kv_tokens: int
    bytes_per_second: float
    flops_per_second: float
    points: tuple[GrowthPoint, ...]
    skipped: tuple[Skipped, ...]

    def to_json(self) -> str:
        points = [
            {**asdict(each), "tokens_per_second": each.tokens_per_second} for each in self.points
        ]
        return json.dumps({**asdict(self), "points": points})


def table(report: GrowthReport) -> str:
    """Output tokens per second, a line for each number of clients and a column for each context."""
    contexts = report.options.contexts
    found = {(each.clients, each.context): each.tokens_per_second for each in report.points}
    rows = [["clients \\ context", *(f"{context:,}" for context in contexts)]]
    for clients in report.options.clients:
        speeds = [found.get((clients, context)) for context in contexts]
        rows.append([f"{clients}", *("-" if each is None else f"{each:,.1f}" for each in speeds)])
    reasons = sorted({each.reason for each in report.skipped})
    return "\n".join(
        [
            f"output tok/s of {report.options.model} in {report.dtype} on {report.device}; decode "
            "steps in process, without a server, over made-up keys and values",
            columns(rows),
            *(f"- {reason}" for reason in reasons),
        ]
    )


def chart(report: GrowthReport) -> str:
    """The table as an SVG: a line for each context."""
    lines = [
        Series(
            f"context {context:,}",
            tuple(
                (float(each.clients), each.tokens_per_second)
                for each in report.points
                if each.context == context
            ),
        )
        for context in report.options.contexts
    ]
    title = f"output tokens per second, {report.options.model} in {report.dtype}"
    return line_chart(title, "clients", [line for line in lines if line.points])


def run_growth(options: GrowthOptions) -> GrowthReport:
    """Load the model and measure every point that fits.

    Raises:
        ValueError: a point that cannot be, or none that fits.
        ModelLoadError: the model cannot be loaded.
    """
    _check(options)
    config = EngineConfig(**{"max_batch": max(options.clients), **options.engine})
    from qwen3_asgi.model.stepping import Bench

    executor = load_model(options.model, config).executor
    try:
        bench = Bench(executor)
        blocks, size = executor.num_kv_blocks, executor.block_size
        skipped: list[Skipped] = []
        fitting: list[tuple[int, int]] = []
        for clients in options.clients:
            for context in options.contexts:
                if context > executor.max_context_tokens:
                    reason = f"longer than the {executor.max_context_tokens:,} tokens of the model"
                elif clients * -(-context // size) > blocks:
                    reason = f"more than the {blocks * size:,} tokens of the KV pool"
                else:
                    fitting.append((clients, context))
                    continue
                skipped.append(Skipped(clients, context, reason))
        if not fitting:
            raise ValueError(f"no point fits: {skipped[0].reason}; raise --num-kv-blocks")
        bench.make_up_kv()
        return _measure(options, bench, fitting, tuple(skipped), blocks * size)
    finally:
        executor.close()


def _measure(
    options: GrowthOptions,
    bench: Measured,
    fitting: list[tuple[int, int]],
    skipped: tuple[Skipped, ...],
    kv_tokens: int,
) -> GrowthReport:
    bench.probe()
    raw = [
        (
            clients,
            context,
            statistics.median(bench.decode_made_up(clients, context, options.steps)),
            sum(scheduling_seconds(clients, context)),
        )
        for clients, context in fitting
    ]
    limits = bench.probe()
    points = []
    for clients, context, model, scheduling in raw:
        needs = bench.decode_needs(clients, context)
        reading, computing = (need / limit for need, limit in zip(needs, limits, strict=True))
        points.append(
            GrowthPoint(
                clients,
                context,
                model_ms=round(model * 1000, 4),
                scheduling_ms=round(scheduling * 1000, 4),
                floor_ms=round(max(reading, computing) * 1000, 4),
                bound="bandwidth" if reading >= computing else "FLOP",
            )
        )
    return GrowthReport(
        options, bench.device, bench.dtype, kv_tokens, *limits, tuple(points), skipped
    )


def _check(options: GrowthOptions) -> None:
    for name, values in (
        ("clients", options.clients),
        ("context", options.contexts),
        ("steps", (options.steps,)),
    ):
        for value in values:
            if value < 1:
                raise ValueError(f"--{name} must be at least 1, got {value}")
