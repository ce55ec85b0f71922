"""Launch of the kernel that quantises activations to float8."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from qwen3_asgi.model.fp8.blocks import BLOCK, FLOAT8, Blocks
from qwen3_asgi.model.fp8.rows import LARGEST, SMALLEST_PEAK, padded

if TYPE_CHECKING:
    from torch import Tensor

GROUPS_A_PROGRAM = 4


def quantize_rows(x: Tensor) -> Blocks:
    """`fp8.rows.quantize_rows` in one kernel, for `x` with neighbouring columns."""
    from qwen3_asgi.model.cuda.kernels.fp8 import quantize_kernel

    rows, width = x.shape
    groups, padded_rows = width // BLOCK, padded(rows)
    values = torch.empty(padded_rows, width, dtype=FLOAT8, device=x.device)
    scales = torch.empty(groups, padded_rows, dtype=torch.float32, device=x.device)
    quantize_kernel[(padded_rows, -(-groups // GROUPS_A_PROGRAM))](
        x,
        values,
        scales,
        rows,
        padded_rows,
        width,
        x.stride(0),
        SMALLEST_PEAK,
        LARGEST,
        GROUPS=GROUPS_A_PROGRAM,
        GROUP=BLOCK,
    )
    return Blocks(values, scales.t())
