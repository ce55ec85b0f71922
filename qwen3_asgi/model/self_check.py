"""Operators on trial before a model uses them: a little of everything, beside the plain ones.

Compiled kernels depend on compilers, drivers and cards that no test has seen. A model that loads
asks here first, and takes the plain operators when anything differs.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from qwen3_asgi.model.batch import build_batch
from qwen3_asgi.model.kv import LayerKV
from qwen3_asgi.scheduler.plan import RequestId, Row

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from qwen3_asgi.model.config import ModelConfig
    from qwen3_asgi.model.operators import Operators

# What is wrong is wrong by its own size; what is only rounded elsewhere, by less than this part.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 4e-2, torch.float16: 1e-2}
ROWS = 3
# Enough for the largest input of the usual models.
NUM_VALUES = 2**18
BLOCK_SIZE = 16
# (tokens before, tokens): the first over several blocks, none with a whole number of them.
SINGLE = ((37, 1), (0, 1))
CHUNKS = ((21, 3), (0, 5))


class Trial:
    """Random inputs in a model's shapes, the same for everybody who is tried."""

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        block_size: int = BLOCK_SIZE,
    ) -> None:
        self._config = config
        self._dtype = dtype
        self._device = device
        self._block_size = block_size
        # Drawn once, for that takes longer than all the rest; nobody else's numbers change by it.
        generator = torch.Generator().manual_seed(0)
        self._values = torch.randn(NUM_VALUES, generator=generator).to(device, dtype)

    def norm(self, operators: Operators) -> Sequence[Tensor]:
        x, _, weight = self._rows()
        return [operators.norm(x, weight)]

    def add_norm(self, operators: Operators) -> Sequence[Tensor]:
        x, delta, weight = self._rows()
        return [operators.add_norm(x, delta, weight), x]

    def silu_mul(self, operators: Operators) -> Sequence[Tensor]:
        return [operators.silu_mul(self._random(4, ROWS, 2 * self._config.intermediate_size))]

    def attention(self, operators: Operators, spans: Sequence[tuple[int, int]]) -> Sequence[Tensor]:
        """The heads' output, and the keys and values that were written.

        Slots beyond the sequences hold NaN: who reads them fails.
        """
        config, block_size = self._config, self._block_size
        counts = [-(-(start + length) // block_size) for start, length in spans]
        num_blocks = sum(counts) + 1
        free = list(range(num_blocks))[::-1]  # so that blocks are not in order
        rows = []
        for number, ((start, length), count) in enumerate(zip(spans, counts, strict=True)):
            table, free = free[:count], free[count:]
            rows.append(Row(RequestId(str(number)), "prefill", [0] * length, start, table, None))
        batch = build_batch(
            rows,
            vocab_size=1,
            block_size=block_size,
            num_blocks=num_blocks,
            max_tokens=max(start + length for start, length in spans),
            device=self._device,
            paged=operators.reads_tables,
        )
        shape = (config.num_kv_heads, num_blocks * block_size, config.head_dim)
        kv = LayerKV(self._random(5, *shape), self._random(6, *shape))
        held = {
            row.block_table[position // block_size] * block_size + position % block_size
            for row in rows
            for position in range(row.start)
        }
        others = [slot for slot in range(shape[1]) if slot not in held]
        for cache in kv:
            cache.index_fill_(1, torch.tensor(others, device=self._device), float("nan"))
        heads = config.num_heads + config.num_kv_heads
        fused = self._random(
            7, len(batch.token_ids), (heads + config.num_kv_heads) * config.head_dim
        )
        weight = self._random(8, heads, config.head_dim)
        pairs = torch.arange(1, config.head_dim // 2 + 1, device=self._device)
        angles = batch.positions[:, None] / pairs
        cos, sin = angles.cos(), angles.sin()
        attend = operators.attention(
            batch,
            torch.cat((cos, cos), dim=-1).unsqueeze(1),
            torch.cat((-sin, sin), dim=-1).unsqueeze(1),
        )
        out = attend(fused, weight, kv)
        return [out, kv.keys[:, batch.slots], kv.values[:, batch.slots]]

    def _rows(self) -> tuple[Tensor, Tensor, Tensor]:
        width = self._config.hidden_size
        return self._random(1, ROWS, width), self._random(2, ROWS, width), self._random(3, width)

    def _random(self, seed: int, *shape: int) -> Tensor:
        size = math.prod(shape)
        values = self._values[seed * 997 :][:size]
        if len(values) < size:
            values = values.repeat(-(-size // len(values)))[:size]
        return values.view(shape).clone()


@torch.inference_mode()
def find_fault(
    candidate: Operators,
    plain: Operators,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
) -> str | None:
    """The first operator of `candidate` that fails or gives something else than `plain`, and how.

    Returns:
        None if all of them agree.
    """
    trial = Trial(config, dtype, device)
    runs: tuple[tuple[str, Callable[[Operators], Sequence[Tensor]]], ...] = (
        ("norm", trial.norm),
        ("add_norm", trial.add_norm),
        ("silu_mul", trial.silu_mul),
        ("attention of single tokens", lambda operators: trial.attention(operators, SINGLE)),
        ("attention of chunks", lambda operators: trial.attention(operators, CHUNKS)),
    )
    for name, run in runs:
        try:
            wrong = difference(run(candidate), run(plain), TOLERANCE[dtype])
        except Exception as error:  # compilers and drivers raise whatever they like
            wrong = f"{type(error).__name__}: {error}"
        if wrong is not None:
            return f"{name}: {wrong}"
    return None


def difference(found: Sequence[Tensor], wanted: Sequence[Tensor], tolerance: float) -> str | None:
    """How `found` differs, anywhere by more than `tolerance` of the value wanted and the mean."""
    for one, other in zip(found, wanted, strict=True):
        if one.shape != other.shape or one.dtype != other.dtype:
            return f"{one.dtype} {list(one.shape)} in place of {other.dtype} {list(other.shape)}"
        wide = other.float()
        scale = wide.abs()
        # What little is left of sums that cancel is as inexact as they were.
        error = (one.float() - wide).abs() / (scale + scale.mean() + 1e-30)
        worst = float(error.max())
        if not worst <= tolerance:  # NaN is never less
            return f"off by {worst:.2g} of the value, where {tolerance:.2g} is rounding"
    return None
