"""Sequences whose every logit is known from running them alone, and steps that mix them."""

from __future__ import annotations

import random
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from qwen3_asgi.model.cpu import greedy, kernels, linear
from qwen3_asgi.scheduler.plan import RequestId, Row
from tests.model.checkpoints import VOCAB, load

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from qwen3_asgi.model.executor import TorchExecutor

BLOCK, BLOCKS = 4, 1400
PATHS = ("compiled", "plain")
DTYPES = ("float32", "bfloat16")
# Beyond the tiles of attention: of 64 keys in the kernels, of 16 queries and 128 keys without.
LENGTHS = (150, 3, 64, 17, 90, 33)


@contextmanager
def path_of(name: str) -> Iterator[None]:
    """Inside, executors are loaded without the compiled kernels if `name` is "plain"."""
    if name == "compiled":
        yield
        return
    real = kernels.kernel_library
    users = (greedy, kernels, linear)
    for module in users:
        module.kernel_library = lambda: (None, "not wanted here")  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for module in users:
            module.kernel_library = real  # type: ignore[attr-defined]


def load_on(path: str, folder: Path, **settings: object) -> TorchExecutor:
    """An executor on one of `PATHS`."""
    with path_of(path):
        return load(
            folder, **{"block_size": BLOCK, "num_kv_blocks": BLOCKS, "num_threads": 1} | settings
        )


class World:
    """`LENGTHS` sequences, and `whole[i]`: the logits `[T, vocab]` of the i-th, run alone at once.

    `adapter` is one that all rows run with.
    """

    def __init__(self, executor: TorchExecutor, *, adapter: str | None = None) -> None:
        self.executor = executor
        self.adapter = adapter
        source = random.Random(5)
        self.tokens = [source.choices(range(VOCAB), k=length) for length in LENGTHS]
        self.whole = [
            executor.forward_logits([self.row(f"whole {i}", i, 0, length, self.table(i))])
            for i, length in enumerate(LENGTHS)
        ]

    def table(self, place: int) -> list[int]:
        """Blocks for the longest sequence, scattered; each place (from 0 to 34) has its own."""
        each = -(-max(LENGTHS) // BLOCK)
        return random.Random(place).sample(range(place * each, (place + 1) * each), k=each)

    def row(self, name: str, which: int, start: int, end: int, table: Sequence[int]) -> Row:
        kind = "prefill" if end - start > 1 else "decode"
        tokens = self.tokens[which][start:end]
        return Row(RequestId(name), kind, tokens, start, table, None, self.adapter)

    def run(self, rows: Sequence[tuple[int, int, int, int]]) -> int:
        """One step of rows (sequence, first, end, place); how many logits are not as alone.

        What is before `first` must have been run at that place.
        """
        found = self.executor.forward_logits(
            [
                self.row(f"{number}", which, start, end, self.table(place))
                for number, (which, start, end, place) in enumerate(rows)
            ]
        )
        wanted = torch.cat([self.whole[which][start:end] for which, start, end, _ in rows])
        return different(found, wanted)


def different(found: torch.Tensor, wanted: torch.Tensor) -> int:
    """How many floats differ by a bit at least. There must be no NaN among them."""
    assert wanted.isfinite().all()
    assert found.shape == wanted.shape
    return int((found.view(torch.int32) != wanted.view(torch.int32)).sum())
