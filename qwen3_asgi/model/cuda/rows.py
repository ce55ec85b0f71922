"""Launches of the kernels over rows: norms and the gated activation."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

SILU_BLOCK = 1024


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`operators.rms_norm` of contiguous rows `[T, width]`."""
    return _norm(x, None, weight, eps)


def add_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Add `delta` to `x` in place and return the norm of the sum; rows `[T, width]`."""
    return _norm(x, delta, weight, eps)


def _norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    from qwen3_asgi.model.cuda.kernels.rows import norm_kernel

    out = torch.empty_like(x)
    rows, width = x.shape
    block = 1 << (width - 1).bit_length()
    norm_kernel[(rows,)](
        x,
        x if delta is None else delta,
        weight,
        out,
        width,
        eps,
        ADD=delta is not None,
        BLOCK=block,
        num_warps=min(16, max(1, block // 512)),
    )
    return out


def silu_mul(fused: Tensor) -> Tensor:
    """`silu(gate) * up` of contiguous `[T, 2 * width]`, gate first."""
    from qwen3_asgi.model.cuda.kernels.rows import silu_mul_kernel

    rows, width = len(fused), fused.shape[1] // 2
    out = fused.new_empty(rows, width)
    grid = (rows, -(-width // SILU_BLOCK))
    silu_mul_kernel[grid](fused, out, width, BLOCK=SILU_BLOCK)
    return out
