"""Activations in float8: a scale for each 128 columns of a row, in the layout of cuBLASLt."""

from __future__ import annotations

import torch
from torch.nn import functional

from qwen3_asgi.model.fp8.blocks import BLOCK, FLOAT8, Blocks

LARGEST = torch.finfo(FLOAT8).max
# Below this, a group counts as zeros: its scale would be no normal float32.
SMALLEST_PEAK = 1e-30
# cuBLASLt reads the scales of activations in fours.
ROW_MULTIPLE = 4


def padded(rows: int) -> int:
    """How many rows `quantize_rows` returns for `rows`."""
    return -(-rows // ROW_MULTIPLE) * ROW_MULTIPLE


def quantize_rows(x: torch.Tensor) -> Blocks:
    """Quantise `x` `[T, in]`, whose width is a multiple of 128.

    Returns:
        Values `[P, in]` with P the next multiple of 4, the rows from T on zeros; scales
        `[P, in / 128]` in float32, which lie in memory column by column.
    """
    x = functional.pad(x.float(), (0, 0, 0, padded(len(x)) - len(x)))
    groups = x.reshape(len(x), -1, BLOCK)
    scales = groups.abs().amax(-1).clamp_(min=SMALLEST_PEAK) / LARGEST
    # The peak may come out above the largest value by a last bit. That is rounded down to it; what
    # is a half step above, older releases of torch turn into NaN.
    values = (groups / scales.unsqueeze(-1)).flatten(1).to(FLOAT8)
    return Blocks(values, scales.t().contiguous().t())
