"""Kernels over rows of hidden states: norms and the gated activation. Sums are in float32."""

import triton
import triton.language as tl


@triton.jit
def norm_kernel(x, delta, weight, out, width, eps, ADD: tl.constexpr, BLOCK: tl.constexpr):
    """One row per program; with ADD, `x` becomes `x + delta` and the sum is normed."""
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    at = tl.program_id(0).to(tl.int64) * width + columns
    row = tl.load(x + at, mask=inside, other=0.0)
    if ADD:
        row = (row.to(tl.float32) + tl.load(delta + at, mask=inside, other=0.0).to(tl.float32)).to(
            x.dtype.element_ty
        )
        tl.store(x + at, row, mask=inside)
    wide = row.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / width + eps)
    # Qwen3's order: cast back first, then times the weight.
    normed = (wide * scale).to(x.dtype.element_ty).to(tl.float32)
    scaled = normed * tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, scaled.to(out.dtype.element_ty), mask=inside)


@triton.jit
def silu_mul_kernel(fused, out, width, BLOCK: tl.constexpr):
    """`silu(gate) * up`; program (row, block of columns)."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    gate = tl.load(fused + row * 2 * width + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(fused + row * 2 * width + width + columns, mask=inside, other=0.0)
    # Rounded between the two, like the plain operations.
    active = (gate * tl.sigmoid(gate)).to(out.dtype.element_ty).to(tl.float32)
    product = (active * up.to(tl.float32)).to(out.dtype.element_ty)
    tl.store(out + row * width + columns, product, mask=inside)
