"""A linear layer that multiplies in float8: its weight takes half the bytes of bfloat16.

The activations are quantised on the way, in groups of 128 columns of a row, and each group's
product with a block of the weight is scaled by both scales, summed in float32.
"""

from __future__ import annotations

import logging
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from qwen3_asgi.model.cuda import fp8 as cuda
from qwen3_asgi.model.fp8.blocks import BLOCK, FLOAT8, Blocks
from qwen3_asgi.model.fp8.rows import quantize_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

# cuBLASLt's rows of weight scales start at multiples of four blocks; a release of torch that did
# not pad them gave wrong products without a word (github.com/pytorch/pytorch/pull/166752).
COLUMN_MULTIPLE = 4 * BLOCK

logger = logging.getLogger(__name__)


class Fp8Linear:
    """`y = x @ weight.T` for bfloat16 `x` `[T, in]`; returns `[T, out]`, as `linear.Linear` does.

    `parts` are stacked along `out`; they must `fit`.
    """

    __slots__ = ("_quantize", "_scales", "_values", "shape")

    def __init__(self, parts: Sequence[Blocks]) -> None:
        self._values = torch.cat([part.values for part in parts])
        self._scales = torch.cat([part.scales for part in parts])
        self.shape = (self._values.shape[0], self._values.shape[1])
        # Torch's own operations would be ten launches for each product of a decode step.
        in_kernel = self._values.device.type == "cuda" and find_spec("triton") is not None
        self._quantize = cuda.quantize_rows if in_kernel else quantize_rows

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        values, scales = self._quantize(x)
        y: torch.Tensor = torch._scaled_mm(
            values,
            self._values.t(),
            scale_a=scales,
            scale_b=self._scales.t(),
            out_dtype=x.dtype,
        )
        return y[: len(x)]


def fit(parts: Sequence[Blocks]) -> bool:
    """Whether `parts` can be stacked for `Fp8Linear`.

    A part that ends inside a block cannot: the next one's scales would start there. All published
    Qwen3 models fit.
    """
    return all(
        part.values.shape[0] % BLOCK == 0 and part.values.shape[1] % COLUMN_MULTIPLE == 0
        for part in parts
    )


def multiplies_fp8(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether `Fp8Linear` works on `device` for activations of `dtype`; found out by trying.

    The kernels are in cuBLASLt from CUDA 12.9 on, for devices of compute capability 9.0 alone so
    far, and not every torch calls them. Other dtypes than bfloat16 are somebody's wish for
    exactness.
    """
    return device.type == "cuda" and dtype == torch.bfloat16 and trial(device)


def trial(device: torch.device) -> bool:
    """Whether a small product of `Fp8Linear` on `device` is what plain torch makes of it."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 2 * COLUMN_MULTIPLE, generator=generator).to(device, torch.bfloat16)
    rows, columns = 2 * BLOCK, x.shape[1]
    values = torch.randn(rows, columns, generator=generator).to(device, FLOAT8)
    # Scales that differ: equal ones would hide that they are read in the wrong order.
    scales = torch.rand(rows // BLOCK, columns // BLOCK, generator=generator).to(device) + 0.5
    weight = Blocks(values, scales)
    try:
        found = Fp8Linear([weight])(x).float()
    except Exception as error:  # a compiler of kernels has errors of its own
        logger.debug("no float8 products on %s: %s", device, error)
        return False
    expected = reference_product(x, weight)
    slack = 1e-2 * float(expected.abs().amax())
    return torch.allclose(found, expected, rtol=1e-2, atol=slack)


def reference_product(x: torch.Tensor, weight: Blocks) -> torch.Tensor:
    """What `Fp8Linear` computes, in float32."""
    values, scales = quantize_rows(x)
    exact = values.float() * scales.repeat_interleave(BLOCK, 1)
    return functional.linear(exact[: len(x)], weight.dequantize(torch.float32))
