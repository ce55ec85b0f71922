"""A matrix in float8 with a scale for each block of 128 x 128 values, and what it stands for.

The format is DeepSeek's (DeepSeek-AI 2024, arXiv:2412.19437, section 3.3.2); Qwen3's FP8
checkpoints have it too.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

BLOCK = 128
FLOAT8 = torch.float8_e4m3fn
# Rows that are converted at once: their float32 values are all that is held beside the result.
STRIPE_ROWS = 8 * BLOCK


class Blocks(NamedTuple):
    """`values` are float8 `[out, in]`, `scales` float32 `[ceil(out / 128), ceil(in / 128)]`.

    The blocks at the lower and right edge may be smaller.
    """

    values: torch.Tensor
    scales: torch.Tensor

    def to(self, device: torch.device) -> Blocks:
        return Blocks(self.values.to(device), self.scales.to(device))

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        """Return each value times its block's scale: new memory, `[out, in]`, rounded once."""
        rows, columns = self.values.shape
        whole = columns // BLOCK
        result = torch.empty(rows, columns, dtype=dtype, device=self.values.device)
        for first in range(0, rows, STRIPE_ROWS):
            stripe = self.values[first : first + STRIPE_ROWS].float()
            scales = self.scales[first // BLOCK : (first + STRIPE_ROWS) // BLOCK]
            by_row = scales.repeat_interleave(BLOCK, 0)[: len(stripe)]
            blocks = stripe[:, : whole * BLOCK].view(len(stripe), whole, BLOCK)
            blocks *= by_row[:, :whole, None]
            stripe[:, whole * BLOCK :] *= by_row[:, whole:]
            result[first : first + STRIPE_ROWS] = stripe
        return result


def scales_shape(rows: int, columns: int) -> tuple[int, int]:
    """The shape of the scales of a matrix `[rows, columns]`."""
    return (-(-rows // BLOCK), -(-columns // BLOCK))
