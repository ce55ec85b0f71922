"""Time to the first token of a long prompt, by where the KV of its prefix is.

On the device, in host memory, in the file (read from the disk, and from the system's page cache),
or nowhere: then it is computed. The engine runs in this process, and one request at a time.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from qwen3_asgi.config import EngineConfig, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from qwen3_asgi.engine.engine import Engine

FIRST = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
# Ids that stand for a token in every Qwen3, the bundled model included.
TOKEN_IDS = range(100, 1000)
BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class TiersOptions:
    """`prompt_tokens` is cut to what the model can hold. `folder` is where the file is put."""

    model: str = "tiny"
    device: str = "auto"
    dtype: str = "auto"
    num_threads: int | None = None
    prompt_tokens: int = 4096
    repeats: int = 5
    host_gib: float = 2.0
    file_gib: float = 2.0
    folder: str | None = None


@dataclass(frozen=True, slots=True)
class TiersReport:
    """Medians in milliseconds, of `repeats` requests each."""

    model: str
    prompt_tokens: int
    cached_tokens: int
    repeats: int
    device_ms: float
    host_ms: float
    page_cache_ms: float
    disk_ms: float
    recomputed_ms: float

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def table(report: TiersReport) -> str:
    """The report as lines for a person."""
    rows = [
        ("device cache", report.device_ms),
        ("host memory", report.host_ms),
        ("file, after a restart (page cache)", report.page_cache_ms),
        ("file, after a restart (disk)", report.disk_ms),
        ("recomputed", report.recomputed_ms),
    ]
    head = (
        f"{report.model}: TTFT of {report.prompt_tokens} tokens, {report.cached_tokens} of them in "
        f"full blocks; median of {report.repeats}"
    )
    width = max(len(name) for name, _ in rows)
    lines = [
        f"{name:<{width}}  {ms:9.1f} ms  1/{report.recomputed_ms / ms:.1f} of recomputing"
        for name, ms in rows
    ]
    return "\n".join([head, *lines])


def run_tiers(options: TiersOptions) -> TiersReport:
    """
    Raises:
        ValueError: a prefix was not where it should have been: the tiers are too small for it.
        ModelLoadError: the model, or the tiers, can't be had.
    """
    source = random.Random(0)
    base = _config(options)
    num_tokens = min(options.prompt_tokens, _longest(options.model) - 1)
    # So few blocks that each prompt drives the one before it out.
    blocks = num_tokens // BLOCK_SIZE + 1
    base = replace(base, num_kv_blocks=blocks, max_context_tokens=num_tokens + 1)
    cached = (num_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE

    def prompts(count: int) -> list[list[int]]:
        return [source.choices(TOKEN_IDS, k=num_tokens) for _ in range(count)]

    with _engine(options, base) as engine:
        _ask(engine, prompts(1), 0)
        recomputed = _ask(engine, prompts(options.repeats), 0)
        again = prompts(1)
        _ask(engine, again, 0)
        on_device = _ask(engine, again * options.repeats, cached)
    with _engine(options, replace(base, host_kv_gib=options.host_gib)) as engine:
        pair = prompts(2)
        _ask(engine, pair, 0)
        from_host = _ask(engine, (pair * options.repeats)[: options.repeats], cached)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        path = Path(folder) / "kv"
        config = replace(base, kv_file=str(path), kv_file_gib=options.file_gib)
        kept = prompts(options.repeats)
        with _engine(options, config) as engine:
            _ask(engine, [*kept, *prompts(2)], 0)  # the last two stay on the device, in part
        _leave_page_cache(path)
        with _engine(options, config) as engine:
            from_disk = _ask(engine, kept, cached)
        with _engine(options, config) as engine:
            from_page_cache = _ask(engine, kept, cached)
    return TiersReport(
        model=options.model,
        prompt_tokens=num_tokens,
        cached_tokens=cached,
        repeats=options.repeats,
        device_ms=on_device,
        host_ms=from_host,
        page_cache_ms=from_page_cache,
        disk_ms=from_disk,
        recomputed_ms=recomputed,
    )


def _config(options: TiersOptions) -> EngineConfig:
    return EngineConfig(
        device=options.device,
        dtype=options.dtype,  # type: ignore[arg-type]
        num_threads=options.num_threads,
        block_size=BLOCK_SIZE,
        max_batch=1,
    )


def _engine(options: TiersOptions, config: EngineConfig) -> Engine:
    from qwen3_asgi.engine.engine import Engine

    return Engine(options.model, config)


def _longest(model: str) -> int:
    from qwen3_asgi.model.checkpoint import find_folder
    from qwen3_asgi.model.config import load_model_config
    from qwen3_asgi.tiny import tiny_path

    folder = Path(tiny_path()) if model == "tiny" else find_folder(model)
    return load_model_config(folder).max_context_tokens


def _ask(engine: Engine, prompts: Sequence[list[int]], cached: int) -> float:
    """Median milliseconds to the first token."""
    return statistics.median(_times(engine, prompts, cached)) * 1000


def _times(engine: Engine, prompts: Sequence[list[int]], cached: int) -> Iterator[float]:
    for prompt in prompts:
        begin = time.perf_counter()
        output = engine.generate_sync(prompt_token_ids=prompt, params=FIRST)
        yield time.perf_counter() - begin
        if output.cached_tokens != cached:
            raise ValueError(
                f"{output.cached_tokens} tokens were cached, not {cached}: give the tiers more room"
            )


def _leave_page_cache(path: Path) -> None:
    """Let the system forget the file, so that it is read from the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
