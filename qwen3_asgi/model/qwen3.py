"""The Qwen3 forward pass over a flattened batch: token ids in, hidden states and logits out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.nn import functional

from qwen3_asgi.model.attention import attend
from qwen3_asgi.model.lora import add_adapters
from qwen3_asgi.model.rope import RotaryTable, rotate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from qwen3_asgi.model.batch import Batch
    from qwen3_asgi.model.config import ModelConfig
    from qwen3_asgi.model.kv import KVPool, LayerKV
    from qwen3_asgi.model.lora import AdaptedRows
    from qwen3_asgi.model.weights import LayerWeights, ModelWeights


class Qwen3:
    """A dense Qwen3 model. One thread at a time; call it under `torch.inference_mode`."""

    def __init__(self, config: ModelConfig, weights: ModelWeights) -> None:
        self._config = config
        self._weights = weights
        self._rotary = RotaryTable(config.rope, config.head_dim, weights.embedding.device)

    def forward(self, batch: Batch, pool: KVPool, adapted: Sequence[AdaptedRows] = ()) -> Tensor:
        """Run all layers, writing the batch's keys and values to `pool`.

        `adapted` says which rows of the batch run with a LoRA adapter.

        Returns:
            Normalised hidden states `[T, hidden]` in the weights' dtype.
        """
        cos, sin = self._rotary.lookup(batch.positions, batch.last_position)
        eps = self._config.rms_norm_eps
        x = functional.embedding(batch.token_ids, self._weights.embedding)
        for index, (layer, kv) in enumerate(zip(self._weights.layers, pool.layers, strict=True)):
            normed = rms_norm(x, layer.input_norm, eps)
            x += self._attention(normed, index, layer, kv, batch, cos, sin, adapted)
            x += _mlp(rms_norm(x, layer.post_attention_norm, eps), index, layer, adapted)
        return rms_norm(x, self._weights.final_norm, eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return float32 logits `[R, vocab]` of hidden states `[R, hidden]`."""
        return self._weights.lm_head(hidden).float()

    def _attention(
        self,
        x: Tensor,
        index: int,
        layer: LayerWeights,
        kv: LayerKV,
        batch: Batch,
        cos: Tensor,
        sin: Tensor,
        adapted: Sequence[AdaptedRows],
    ) -> Tensor:
        config = self._config
        num_heads, kv_heads = config.num_heads, config.num_kv_heads
        fused = layer.qkv(x)
        add_adapters(adapted, index, "qkv", x, fused)
        qkv = fused.view(len(x), num_heads + 2 * kv_heads, config.head_dim)
        qk = rms_norm(qkv[:, : num_heads + kv_heads], layer.qk_norm, config.rms_norm_eps)
        qk = rotate(qk, cos, sin)
        queries, keys = qk[:, :num_heads], qk[:, num_heads:]
        values = qkv[:, num_heads + kv_heads :]
        kv.write(batch.slots, keys, values)
        heads = attend(queries, keys, values, kv, batch.segments)
        output = layer.output(heads)
        add_adapters(adapted, index, "output", heads, output)
        return output


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last dimension (Zhang and Sennrich 2019, arXiv:1910.07467).

    In float32, cast back, and only then times the weight: Qwen3 was trained with this order, and
    in bf16 another order gives other tokens.
    """
    return functional.rms_norm(x.float(), x.shape[-1:], None, eps).to(x.dtype) * weight


def _mlp(x: Tensor, index: int, layer: LayerWeights, adapted: Sequence[AdaptedRows]) -> Tensor:
    fused = layer.gate_up(x)
    add_adapters(adapted, index, "gate_up", x, fused)
    gate, up = fused.chunk(2, dim=-1)
    inner = functional.silu(gate).mul_(up)
    output = layer.down(inner)
    add_adapters(adapted, index, "down", inner, output)
    return output
