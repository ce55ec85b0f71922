"""The Qwen3 forward pass over a flattened batch: token ids in, hidden states and logits out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.nn import functional

from qwen3_asgi.model.attention import attend
from qwen3_asgi.model.rope import RotaryTable, rotate

if TYPE_CHECKING:
    from torch import Tensor

    from qwen3_asgi.model.batch import Batch
    from qwen3_asgi.model.config import ModelConfig
    from qwen3_asgi.model.kv import KVPool, LayerKV
    from qwen3_asgi.model.weights import LayerWeights, ModelWeights


class Qwen3:
    """A dense Qwen3 model. One thread at a time; call it under `torch.inference_mode`."""

    def __init__(self, config: ModelConfig, weights: ModelWeights) -> None:
        self._config = config
        self._weights = weights
        self._rotary = RotaryTable(config.rope, config.head_dim, weights.embedding.device)

    def forward(self, batch: Batch, pool: KVPool) -> Tensor:
        """Run all layers, writing the batch's keys and values to `pool`.

        Returns:
            Normalised hidden states `[T, hidden]` in the weights' dtype.
        """
        cos, sin = self._rotary.lookup(batch.positions, batch.last_position)
        eps = self._config.rms_norm_eps
        x = functional.embedding(batch.token_ids, self._weights.embedding)
        for layer, kv in zip(self._weights.layers, pool.layers, strict=True):
            x += self._attention(rms_norm(x, layer.input_norm, eps), layer, kv, batch, cos, sin)
            x += _mlp(rms_norm(x, layer.post_attention_norm, eps), layer)
        return rms_norm(x, self._weights.final_norm, eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return float32 logits `[R, vocab]` of hidden states `[R, hidden]`."""
        return self._weights.lm_head(hidden).float()

    def _attention(
        self,
        x: Tensor,
        layer: LayerWeights,
        kv: LayerKV,
        batch: Batch,
        cos: Tensor,
        sin: Tensor,
    ) -> Tensor:
        config = self._config
        num_heads, kv_heads = config.num_heads, config.num_kv_heads
        qkv = layer.qkv(x).view(len(x), num_heads + 2 * kv_heads, config.head_dim)
        qk = rms_norm(qkv[:, : num_heads + kv_heads], layer.qk_norm, config.rms_norm_eps)
        qk = rotate(qk, cos, sin)
        queries, keys = qk[:, :num_heads], qk[:, num_heads:]
        values = qkv[:, num_heads + kv_heads :]
        kv.write(batch.slots, keys, values)
        return layer.output(attend(queries, keys, values, kv, batch.segments))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last dimension (Zhang and Sennrich 2019, arXiv:1910.07467).

    In float32, cast back, and only then times the weight: Qwen3 was trained with this order, and
    in bf16 another order gives other tokens.
    """
    return functional.rms_norm(x.float(), x.shape[-1:], None, eps).to(x.dtype) * weight


def _mlp(x: Tensor, layer: LayerWeights) -> Tensor:
    gate, up = layer.gate_up(x).chunk(2, dim=-1)
    return layer.down(functional.silu(gate).mul_(up))
