"""One engine step: where its time goes, and how far it is from what the machine can do at most.

The whole of a model's step is timed without a stopwatch inside; its parts come from steps with
stopwatches, as shares. What the scheduler adds is timed on an executor that computes nothing, with
as many requests, and the real delivery to an event loop.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict, dataclass, field, replace
from operator import truediv
from pathlib import Path
from typing import Any, Protocol

from qwen3_asgi.bench.figures import columns
from qwen3_asgi.bench.llama_cpp import LlamaCpp
from qwen3_asgi.bench.step_scheduling import scheduling_seconds
from qwen3_asgi.config import EngineConfig
from qwen3_asgi.engine.loading import load_model

MODEL_PARTS = ("attention", "linear", "norm", "sampling", "other")
PARTS = (*MODEL_PARTS, "scheduling", "delivery")


class Timing(Protocol):
    """As `model.stepping.Timing`: `limits` are those beside each step of `plain`."""

    @property
    def plain(self) -> list[float]: ...

    @property
    def limits(self) -> list[tuple[float, float]]: ...

    @property
    def peers(self) -> dict[str, list[float]]: ...

    @property
    def parts(self) -> list[dict[str, float]]: ...


class Measured(Protocol):
    """What is asked of `model.stepping.Bench`, which needs torch."""

    @property
    def device(self) -> str: ...

    @property
    def dtype(self) -> str: ...

    def probe(self) -> tuple[float, float]: ...

    def decode(self, batch: int, context: int, steps: int) -> Timing: ...

    def decode_needs(self, batch: int, context: int) -> tuple[int, int]: ...

    def prefill(self, chunk: int, steps: int) -> Timing: ...

    def prefill_needs(self, chunk: int) -> tuple[int, int]: ...


@dataclass(frozen=True, slots=True)
class StepOptions:
    """Every batch at every context (tokens a row attends to), and prefill of every chunk.

    `engine` has fields of `EngineConfig`; the number of KV blocks follows from the points. Peers,
    each in turn with the steps: a loop of transformers, llama.cpp on a GGUF file, and `others`, the
    same engine with some fields of its configuration changed.
    """

    model: str = "tiny"
    engine: dict[str, Any] = field(default_factory=dict)
    batches: tuple[int, ...] = (1, 8)
    contexts: tuple[int, ...] = (128, 1024)
    chunks: tuple[int, ...] = (128, 512)
    steps: int = 10
    compare_transformers: bool = False
    compare_llama_cpp: Path | None = None
    others: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class Point:
    """A decode step, or a prefill of one chunk (`parts` is empty then). Medians, in milliseconds.

    `parts` sum to `step_ms`. `floor_ms` is what reading the bytes or doing the operations takes at
    the measured limits, whichever is more, `bound` says which; `of_floor` is its share of the
    model's part of the step. `of_floor_beside` is the median of the same shares with the limits as
    they were right after each step, where `floor_ms` is for the best of the whole run: a machine
    that others use, too, has its best for moments only. `peer_ms` has the peers' times, and
    `ratios` the median of their times by the model's, step by step.
    """

    kind: str
    batch: int
    tokens: int
    step_ms: float
    model_ms: float
    parts: dict[str, float]
    floor_ms: float
    bound: str
    of_floor: float
    of_floor_beside: float
    peer_ms: dict[str, float]
    ratios: dict[str, float]

    @property
    def tokens_per_second(self) -> float:
        tokens = self.batch if self.kind == "decode" else self.tokens
        return tokens / self.step_ms * 1000


@dataclass(frozen=True, slots=True)
class StepReport:
    """All points, and the limits: bytes read per second and operations per second."""

    options: StepOptions
    device: str
    dtype: str
    threads: int | None
    bytes_per_second: float
    flops_per_second: float
    points: tuple[Point, ...]

    def to_json(self) -> str:
        points = [
            {**asdict(each), "tokens_per_second": round(each.tokens_per_second, 3)}
            for each in self.points
        ]
        return json.dumps({**asdict(self), "points": points}, default=str)


def table(report: StepReport) -> str:
    """The report as lines for a person."""
    peers = list(report.points[0].ratios) if report.points else []
    ends = ["floor ms", "of floor", "beside it", "tok/s", *peers]
    decode = [["decode: batch, context", "step ms", *PARTS, *ends]]
    prefill = [["prefill: tokens", "ms", *ends]]
    for point in report.points:
        tail = [
            f"{point.floor_ms:.3g} ({point.bound})",
            f"{point.of_floor:.0%}",
            f"{point.of_floor_beside:.0%}",
            f"{point.tokens_per_second:,.0f}",
            *(f"{point.ratios[name]:.2f}x" for name in peers),
        ]
        if point.kind == "prefill":
            prefill.append([f"{point.tokens}", f"{point.step_ms:.3g}", *tail])
            continue
        shares = [f"{point.parts[name] / point.step_ms:.1%}" for name in PARTS]
        decode.append([f"{point.batch}, {point.tokens}", f"{point.step_ms:.3g}", *shares, *tail])
    head = (
        f"{report.options.model} in {report.dtype} on {report.device}; measured limits: "
        f"{report.bytes_per_second / 1e9:.1f} GB/s read, "
        f"{report.flops_per_second / 1e12:.3g} TFLOP/s"
    )
    tables = [columns(rows) for rows in (decode, prefill) if len(rows) > 1]
    notes = [
        "attention includes QK norm, RoPE and the KV write; norm includes the activation",
        "of floor: at the best rates of the run; beside it: at those measured after each step",
    ]
    if peers:
        notes.append(f"{', '.join(peers)}: their time by the model's, in turn")
    return "\n".join([head, *tables, *notes])


def run_step(options: StepOptions) -> StepReport:
    """Load the model and measure every point.

    Raises:
        ValueError: a point that cannot be, or no transformers to compare with.
        ModelLoadError: the model cannot be loaded.
    """
    _check(options)
    # On CUDA larger batches than `max_batch` would run without their graphs.
    rows = {"max_batch": max(options.batches), **options.engine}
    config = EngineConfig(**{**rows, "num_kv_blocks": _blocks(options)})
    from qwen3_asgi.model.stepping import Bench

    executor = load_model(options.model, config).executor
    try:
        bench = Bench(executor)
    except ValueError:
        executor.close()
        raise
    try:
        longest = max(*options.contexts, *options.chunks)
        if longest > executor.max_context_tokens:
            raise ValueError(
                f"{options.model} holds at most {executor.max_context_tokens} tokens, got {longest}"
            )
        if options.compare_transformers:
            bench.add_transformers(_folder(options.model, config))
        if options.compare_llama_cpp is not None:
            bench.add_peer(LlamaCpp(options.compare_llama_cpp, bench.threads))
        for changes in options.others:
            name = ", ".join(f"{key}={value}" for key, value in changes.items())
            other = replace(config, **changes)
            bench.add_own(name, load_model(options.model, other).executor)
        return _measure(options, bench)
    finally:
        bench.close()


def _measure(options: StepOptions, bench: Measured) -> StepReport:
    bench.probe()
    raw = []
    for batch in options.batches:
        for context in options.contexts:
            found = bench.decode(batch, context, options.steps)
            raw.append((batch, context, found, scheduling_seconds(batch, context)))
            bench.probe()
    prefills = [(chunk, bench.prefill(chunk, options.steps)) for chunk in options.chunks]
    limits = bench.probe()
    points = []
    for batch, context, found, (scheduling, delivery) in raw:
        model = statistics.median(found.plain)
        parts = {name: seconds * model for name, seconds in _shares(found.parts).items()} | {
            "scheduling": scheduling,
            "delivery": delivery,
        }
        needs = bench.decode_needs(batch, context)
        points.append(_point("decode", batch, context, found, parts, needs, limits))
    for chunk, found in prefills:
        points.append(_point("prefill", 1, chunk, found, {}, bench.prefill_needs(chunk), limits))
    threads = options.engine.get("num_threads")
    return StepReport(options, bench.device, bench.dtype, threads, *limits, tuple(points))


def _shares(steps: list[dict[str, float]]) -> dict[str, float]:
    """Each part's share of the split steps; "other" is what no stopwatch was around."""
    whole = sum(each["step"] for each in steps)
    shares = {
        name: sum(each[name] for each in steps) / whole for name in MODEL_PARTS if name != "other"
    }
    return {**shares, "other": max(0.0, 1.0 - sum(shares.values()))}


def _point(
    kind: str,
    batch: int,
    tokens: int,
    found: Timing,
    parts: dict[str, float],
    needs: tuple[int, int],
    limits: tuple[float, float],
) -> Point:
    reading, computing = _floors(needs, limits)
    floor, model = max(reading, computing), statistics.median(found.plain)
    beside = [max(_floors(needs, each)) for each in found.limits]
    step = sum(parts.values()) if parts else model
    return Point(
        kind,
        batch,
        tokens,
        step_ms=step * 1000,
        model_ms=model * 1000,
        parts={name: part * 1000 for name, part in parts.items()},
        floor_ms=floor * 1000,
        bound="bandwidth" if reading >= computing else "FLOP",
        of_floor=round(floor / model, 4),
        of_floor_beside=round(statistics.median(map(truediv, beside, found.plain)), 4),
        peer_ms={name: statistics.median(each) * 1000 for name, each in found.peers.items()},
        ratios={
            name: round(statistics.median(map(truediv, theirs, found.plain)), 3)
            for name, theirs in found.peers.items()
        },
    )


def _floors(needs: tuple[int, int], limits: tuple[float, float]) -> tuple[float, float]:
    """Seconds of reading the bytes and of doing the operations."""
    return needs[0] / limits[0], needs[1] / limits[1]


def _blocks(options: StepOptions) -> int:
    """KV blocks for the largest point, in the smallest blocks that may be configured."""
    size = options.engine.get("block_size", EngineConfig().block_size)
    each = -(-max(*options.contexts, *options.chunks) // size)
    return int(max(options.batches) * each + 1)


def _folder(model: str, config: EngineConfig) -> Path | None:
    """The checkpoint's folder; None for dummy weights."""
    if config.load_format == "dummy":
        return None
    from qwen3_asgi.model.checkpoint import find_folder
    from qwen3_asgi.tiny import tiny_path

    return Path(tiny_path()) if model == "tiny" else find_folder(model)


def _check(options: StepOptions) -> None:
    for name, values in (
        ("batch", options.batches),
        ("context", options.contexts),
        ("chunk", options.chunks),
        ("steps", (options.steps,)),
    ):
        for value in values:
            if value < (2 if name == "chunk" else 1):
                raise ValueError(f"--{name} {value} is too small")
