"""A product with a weight, in tiles of one size that each sum over the whole depth in order."""

import triton
import triton.language as tl


# One compiled kernel whatever the number of rows: 1 and multiples of 16 would get their own.
@triton.jit(do_not_specialize=["rows"])
def linear_kernel(
    x,
    weight,
    y,
    rows,
    columns,
    depth,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WIDE: tl.constexpr,  # multiply in float32: the interpreter cannot in bfloat16
):
    """`y = x @ weight.T`; program (block of columns, block of rows). All are contiguous."""
    column = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.program_id(1).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in range(0, depth, BLOCK_K):
        inside = first + k < depth
        a = tl.load(
            x + row[:, None] * depth + (first + k)[None, :],
            mask=(row < rows)[:, None] & inside[None, :],
            other=0.0,
        )
        b = tl.load(
            weight + column[:, None] * depth + (first + k)[None, :],
            mask=(column < columns)[:, None] & inside[None, :],
            other=0.0,
        )
        if WIDE:
            a = a.to(tl.float32)
            b = b.to(tl.float32)
        acc = tl.dot(a, tl.trans(b), acc, input_precision="ieee")
    tl.store(
        y + row[:, None] * columns + column[None, :],
        acc.to(y.dtype.element_ty),
        mask=(row < rows)[:, None] & (column < columns)[None, :],
    )
