"""From the fused qkv product to rotated queries in place, and keys and values in the pool."""

import triton
import triton.language as tl


@triton.jit
def _normed(half, scale, weight):
    dtype = half.dtype
    normed = (half.to(tl.float32) * scale).to(dtype).to(tl.float32)
    # Rounded again before it is rotated, like the plain operations.
    return (normed * weight.to(tl.float32)).to(dtype).to(tl.float32)


@triton.jit
def heads_kernel(
    fused,
    fused_stride,
    weight,
    cos,
    sin,
    slots,
    keys,
    values,
    kv_head_stride,
    kv_slot_stride,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
):
    """Program (token, head). A negative slot is a row that fills up a batch: nothing is written."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    pair = tl.arange(0, HALF)
    source = fused + token * fused_stride + head * 2 * HALF + pair
    low = tl.load(source)
    high = tl.load(source + HALF)
    slot = tl.load(slots + token)
    held = pair < tl.where(slot >= 0, HALF, 0)
    if head < HEADS + KV_HEADS:
        wide_low = low.to(tl.float32)
        wide_high = high.to(tl.float32)
        square = tl.sum(wide_low * wide_low, axis=0) + tl.sum(wide_high * wide_high, axis=0)
        scale = tl.rsqrt(square / (2 * HALF) + eps)
        scales = weight + head * 2 * HALF + pair
        a = _normed(low, scale, tl.load(scales))
        b = _normed(high, scale, tl.load(scales + HALF))
        # The first half of the sines is negated already.
        angle = token * 2 * HALF + pair
        new_low = a * tl.load(cos + angle) + b * tl.load(sin + angle)
        new_high = b * tl.load(cos + angle + HALF) + a * tl.load(sin + angle + HALF)
        low = new_low.to(low.dtype)
        high = new_high.to(high.dtype)
        if head < HEADS:
            tl.store(source, low)
            tl.store(source + HALF, high)
        else:
            kv_head = (head - HEADS).to(tl.int64)
            target = keys + kv_head * kv_head_stride + slot * kv_slot_stride + pair
            tl.store(target, low, mask=held)
            tl.store(target + HALF, high, mask=held)
    else:
        kv_head = (head - HEADS - KV_HEADS).to(tl.int64)
        target = values + kv_head * kv_head_stride + slot * kv_slot_stride + pair
        tl.store(target, low, mask=held)
        tl.store(target + HALF, high, mask=held)
