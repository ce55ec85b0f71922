"""What a process with a model has in memory beside the model's weights and KV pool, and where from.

A fresh process (`memory_child`) loads the model, writes to all of its KV pool, so that all of it
is in memory and can be taken off, and answers some requests.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from typing import Any

from qwen3_asgi.bench.figures import columns

MIB = 2**20
# The stages in order, each with what comes into memory in it.
STAGES = {
    "interpreter": "interpreter",
    "package": "import of the package, without torch",
    "server": "import of the server, and the app",
    "torch": "import of torch and of the model's code",
    "tokenizer": "tokenizer",
    "weights": "weights, beyond the model's own",
    "kv pool": "KV pool, before it is used",
    "model": "kernels, tables, sampler, host tiers",
    "pool": "KV pool in use, beyond its own blocks",
    "requests": "requests: activations, caches",
}


@dataclass(frozen=True, slots=True)
class MemoryOptions:
    """`engine` has fields of `EngineConfig`; `requests` run at once, each of these sizes."""

    model: str = "tiny"
    engine: dict[str, Any] = field(default_factory=dict)
    requests: int = 8
    prompt_tokens: int = 512
    output_tokens: int = 16


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """Bytes. `stages` is what each stage added to the process's memory, without the weights and the
    blocks that it brought; they sum to `beside`.

    `resident` is all of the process at the end, `peak` the most it had. `tied_copy` is a packed
    second copy of a tied embedding, which is no weight of the model: it is part of `beside`.
    """

    options: MemoryOptions
    resident: int
    peak: int
    weights: int
    tied_copy: int
    kv_pool: int
    stages: dict[str, int]

    @property
    def beside(self) -> int:
        return self.resident - self.weights - self.kv_pool

    @property
    def beside_copies(self) -> int:
        """`beside`, when the packed copy counts as weights."""
        return self.beside - self.tied_copy

    def to_json(self) -> str:
        return json.dumps(
            {**asdict(self), "beside": self.beside, "beside_copies": self.beside_copies}
        )


def table(report: MemoryReport) -> str:
    """The report as lines for a person."""
    rows = [[f"memory of a process with {report.options.model}", "MiB"]]
    for stage, words in STAGES.items():
        rows.append([words, f"{report.stages[stage] / MIB:,.1f}"])
    rows += [
        ["beside weights and KV pool", f"{report.beside / MIB:,.1f}"],
        ["of which a packed copy of the tied embedding", f"{report.tied_copy / MIB:,.1f}"],
        ["beside weights, their copy and KV pool", f"{report.beside_copies / MIB:,.1f}"],
        ["weights", f"{report.weights / MIB:,.1f}"],
        ["KV pool", f"{report.kv_pool / MIB:,.1f}"],
        ["resident at the end", f"{report.resident / MIB:,.1f}"],
        ["peak, with what only the start needs", f"{report.peak / MIB:,.1f}"],
    ]
    return columns(rows)


def run_memory(options: MemoryOptions) -> MemoryReport:
    """
    Raises:
        ValueError: nothing to do, or the process did not get to its end.
    """
    for name in ("requests", "prompt_tokens", "output_tokens"):
        value = getattr(options, name)
        if value < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
    done = subprocess.run(
        [sys.executable, "-m", "qwen3_asgi.bench.memory_child", json.dumps(asdict(options))],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode or not done.stdout:
        raise ValueError("the process did not get to its end; its own words are above")
    told = json.loads(done.stdout)
    known = {"weights": told["weights"], "pool": told["kv_pool"]}
    return MemoryReport(
        options,
        told["resident"],
        told["peak"],
        told["weights"],
        told["tied_copy"],
        told["kv_pool"],
        _stages(told["marks"], known),
    )


def _stages(marks: list[tuple[str, int]], known: dict[str, int]) -> dict[str, int]:
    """What each stage added, less what is `known` of it.

    Raises:
        ValueError: a stage is missing, or there is one that nobody knows.
    """
    names = [name for name, _ in marks]
    if names != list(STAGES):
        raise ValueError(f"the process told of the stages {names}, expected {list(STAGES)}")
    found, before = {}, 0
    for name, resident in marks:
        found[name] = resident - before - known.get(name, 0)
        before = resident
    return found
