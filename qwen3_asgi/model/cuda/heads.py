"""Launch of the kernel between the qkv product and attention."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from qwen3_asgi.model.kv import LayerKV


def norm_rotate_write(
    fused: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    kv: LayerKV,
    *,
    num_heads: int,
    eps: float,
) -> None:
    """Norm and rotate queries and keys; queries stay in `fused`, keys and values go to `kv`.

    Args:
        fused: qkv products `[T, (N + 2K) D]`, contiguous; D is a power of 2.
        weight: of the norm, `[N + K, D]`.
        cos: and `sin`, float32 `[T, 1, D]` of `RotaryTable`.
        slots: int64 `[T]`; a row with a negative one writes nothing.
    """
    from qwen3_asgi.model.cuda.kernels.heads import heads_kernel

    kv_heads, _, dim = kv.keys.shape
    _same_layout(kv)
    heads_kernel[(len(fused), num_heads + 2 * kv_heads)](
        fused,
        fused.stride(0),
        weight,
        cos,
        sin,
        slots,
        kv.keys,
        kv.values,
        kv.keys.stride(0),
        kv.keys.stride(1),
        eps,
        HEADS=num_heads,
        KV_HEADS=kv_heads,
        HALF=dim // 2,
        num_warps=1,
    )


def _same_layout(kv: LayerKV) -> None:
    if kv.keys.stride() != kv.values.stride() or kv.keys.stride(2) != 1:
        raise ValueError(
            f"keys and values must have the same strides, 1 within a head; they have "
            f"{kv.keys.stride()} and {kv.values.stride()}"
        )
