"""The kernel that quantises activations to float8 before a product."""

import triton
import triton.language as tl


@triton.jit
def quantize_kernel(
    x,
    values,
    scales,
    rows,
    padded_rows,
    width,
    stride,
    smallest_peak,
    largest,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Program (row, GROUPS groups of GROUP columns); rows from `rows` on are zeros.

    `scales` lie group by group: the scale of a row is at `group * padded_rows + row`.
    """
    row = tl.program_id(0).to(tl.int64)
    groups = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    columns = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    there = columns < tl.where(row < rows, width, 0)
    tile = tl.load(x + row * stride + columns, mask=there, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(tile), axis=1), smallest_peak) / largest
    quantised = (tile / scale[:, None]).to(values.dtype.element_ty)
    tl.store(values + row * width + columns, quantised, mask=columns < width)
    tl.store(scales + groups * padded_rows + row, scale, mask=groups * GROUP < width)
