"""`CudaOperators`: what a layer does between its matrix products, in Triton kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qwen3_asgi.model.cuda.attention import Layout, lay_out, paged_attention
from qwen3_asgi.model.cuda.heads import norm_rotate_write
from qwen3_asgi.model.cuda.rows import add_norm, norm, silu_mul
from qwen3_asgi.model.cuda.varlen import attend_chunks, chunks_of

if TYPE_CHECKING:
    from torch import Tensor

    from qwen3_asgi.model.batch import Batch
    from qwen3_asgi.model.cuda.varlen import VarlenAttention
    from qwen3_asgi.model.kv import LayerKV
    from qwen3_asgi.model.operators import Attention, Operators


class CudaOperators:
    """See `operators.Operators`. `head_dim` must be a power of 2.

    With `one_order`, a row's attention is the same to the last bit whether it was decoded or part
    of a chunk; decoding long contexts is slower then. `varlen` takes the place of our kernel for
    chunks of prompts, see `varlen.choose_varlen`; it is set before the first step, if at all.
    """

    reads_tables = True

    def __init__(
        self,
        num_heads: int,
        kv_heads: int,
        head_dim: int,
        eps: float,
        *,
        one_order: bool = False,
    ) -> None:
        self._num_heads = num_heads
        self._kv_heads = kv_heads
        self._width = num_heads * head_dim
        self._eps = eps
        self.one_order = one_order
        self.varlen: VarlenAttention | None = None

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return norm(x, weight, self._eps)

    def add_norm(self, x: Tensor, delta: Tensor, weight: Tensor) -> Tensor:
        return add_norm(x, delta, weight, self._eps)

    def attention(self, batch: Batch, cos: Tensor, sin: Tensor) -> Attention:
        layout = lay_out(
            batch.last_rows,
            batch.last_position,
            self._num_heads // self._kv_heads,
            batch.positions.device,
            one_order=self.one_order,
        )
        return self.laid_out(batch, layout, cos, sin)

    def laid_out(self, batch: Batch, layout: Layout, cos: Tensor, sin: Tensor) -> Attention:
        """Attention of a batch that is spread over programs already.

        Raises:
            ValueError: the batch was built without block tables.
        """
        paged = batch.paged
        if paged is None:
            raise ValueError("CUDA attention reads block tables: build the batch with paged=True")

        varlen, chunks = self.varlen, None
        if varlen is not None and layout.tiles is not None and not self.one_order:
            chunks = chunks_of(batch, layout.num_single)
            layout = layout._replace(tiles=None)

        def run(fused: Tensor, qk_norm: Tensor, kv: LayerKV) -> Tensor:
            norm_rotate_write(
                fused,
                qk_norm,
                cos,
                sin,
                batch.slots,
                kv,
                num_heads=self._num_heads,
                eps=self._eps,
            )
            out = fused.new_empty(len(fused), self._width)
            paged_attention(fused, kv, paged, layout, out, num_heads=self._num_heads)
            if varlen is not None and chunks is not None:
                attend_chunks(
                    varlen, fused, kv, paged.block_size, chunks, out, num_heads=self._num_heads
                )
            return out

        return run

    def silu_mul(self, fused: Tensor) -> Tensor:
        return silu_mul(fused)


if TYPE_CHECKING:
    _conforms: type[Operators] = CudaOperators
