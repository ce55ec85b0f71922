"""What a layer does between its matrix products, behind one interface.

`TorchOperators` is the plain one for any device and dtype; `cpu.kernels.CpuKernels` does the same
in compiled kernels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from torch.nn import functional

from qwen3_asgi.model.attention import attend
from qwen3_asgi.model.rope import rotate

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from qwen3_asgi.model.batch import Batch
    from qwen3_asgi.model.kv import LayerKV

    # qkv products [T, (N + 2K) D], the norm's weight [N + K, D], the layer's pool -> [T, N D].
    # What it is given may be overwritten; keys and values are written to the pool.
    Attention = Callable[[Tensor, Tensor, LayerKV], Tensor]


class Operators(Protocol):
    """Rows are `[T, width]` in the weights' dtype. Used by several threads at once."""

    @property
    def reads_tables(self) -> bool:
        """Attention goes by `Batch.paged`, not by `Batch.segments`."""
        ...

    def norm(self, x: Tensor, weight: Tensor) -> Tensor: ...

    def add_norm(self, x: Tensor, delta: Tensor, weight: Tensor) -> Tensor:
        """Add `delta` to `x` in place and return the norm of the sum."""
        ...

    def attention(self, batch: Batch, cos: Tensor, sin: Tensor) -> Attention:
        """Attention of a step; `cos` and `sin` are float32 `[T, 1, D]`, see `RotaryTable`."""
        ...

    def silu_mul(self, fused: Tensor) -> Tensor:
        """`silu(gate) * up` of `[T, 2 * width]`, gate first."""
        ...


class TorchOperators:
    """In torch's own operations."""

    reads_tables = False
    _attend = staticmethod(attend)

    def __init__(self, num_heads: int, kv_heads: int, head_dim: int, eps: float) -> None:
        self._num_heads = num_heads
        self._kv_heads = kv_heads
        self._head_dim = head_dim
        self._eps = eps

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, weight, self._eps)

    def add_norm(self, x: Tensor, delta: Tensor, weight: Tensor) -> Tensor:
        x += delta
        return rms_norm(x, weight, self._eps)

    def attention(self, batch: Batch, cos: Tensor, sin: Tensor) -> Attention:
        rotated = self._num_heads + self._kv_heads

        def run(fused: Tensor, qk_norm: Tensor, kv: LayerKV) -> Tensor:
            qkv = fused.view(len(fused), -1, self._head_dim)
            qk = rotate(rms_norm(qkv[:, :rotated], qk_norm, self._eps), cos, sin)
            queries, keys = qk[:, : self._num_heads], qk[:, self._num_heads :]
            values = qkv[:, rotated:]
            kv.write(batch.slots, keys, values)
            return self._attend(queries, keys, values, kv, batch.segments)

        return run

    def silu_mul(self, fused: Tensor) -> Tensor:
        gate, up = fused.chunk(2, dim=-1)
        return functional.silu(gate).mul_(up)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last dimension (Zhang and Sennrich 2019, arXiv:1910.07467).

    In float32, cast back, and only then times the weight: Qwen3 was trained with this order, and
    in bf16 another order gives other tokens.
    """
    return functional.rms_norm(x.float(), x.shape[-1:], None, eps).to(x.dtype) * weight
