"""The Qwen3 forward pass over a flattened batch: token ids in, hidden states and logits out."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from qwen3_asgi.model.cpu.kernels import cpu_kernels
from qwen3_asgi.model.cpu.layers import cpu_layers
from qwen3_asgi.model.cuda.choosing import cuda_operators
from qwen3_asgi.model.lora import add_adapters
from qwen3_asgi.model.operators import TorchOperators
from qwen3_asgi.model.rope import RotaryTable
from qwen3_asgi.model.self_check import find_fault
from qwen3_asgi.model.upload import upload

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from qwen3_asgi.model.batch import Batch
    from qwen3_asgi.model.config import ModelConfig
    from qwen3_asgi.model.kv import KVPool
    from qwen3_asgi.model.linear import Table
    from qwen3_asgi.model.lora import AdaptedRows
    from qwen3_asgi.model.operators import Operators
    from qwen3_asgi.model.weights import ModelWeights

logger = logging.getLogger(__name__)


class Qwen3:
    """A dense Qwen3 model. One thread at a time; call it under `torch.inference_mode`.

    `operators` are what it runs between the matrix products, `choose_operators` by default.
    """

    def __init__(
        self, config: ModelConfig, weights: ModelWeights, operators: Operators | None = None
    ) -> None:
        self._weights = weights
        self._rotary = RotaryTable(config.rope, config.head_dim, weights.embedding.device)
        self.operators = operators or choose_operators(config, weights.embedding)

    @property
    def operators(self) -> Operators:
        return self._operators

    @operators.setter
    def operators(self, operators: Operators) -> None:
        self._operators = operators
        # All layers in one call, where these operators can.
        self.whole = cpu_layers(operators, self._weights)

    def forward(
        self,
        batch: Batch,
        pool: KVPool,
        adapted: Sequence[AdaptedRows] = (),
        wanted: Sequence[int] | None = None,
    ) -> Tensor:
        """Run all layers, writing the batch's keys and values to `pool`.

        `adapted` says which rows of the batch run with a LoRA adapter.

        Returns:
            Normalised hidden states of the rows `wanted`, ascending, or of all: `[W, hidden]` in
            the weights' dtype.
        """
        weights, operators = self._weights, self.operators
        cos, sin = self._rotary.lookup(batch.positions, batch.last_position)
        x = weights.embedding.rows(batch.token_ids)
        if self.whole is not None and not adapted:
            return self.whole(x, batch, pool, cos, sin, wanted)
        attend = operators.attention(batch, cos, sin)
        layers = weights.layers
        # Each sum is normed at once for whoever reads it next.
        norms_after = (*(layer.input_norm for layer in layers[1:]), weights.final_norm)
        normed = operators.norm(x, layers[0].input_norm)
        for index, (layer, kv, norm_after) in enumerate(
            zip(layers, pool.layers, norms_after, strict=True)
        ):
            fused = layer.qkv(normed)
            add_adapters(adapted, index, "qkv", normed, fused)
            heads = attend(fused, layer.qk_norm, kv)
            output = layer.output(heads)
            add_adapters(adapted, index, "output", heads, output)
            normed = operators.add_norm(x, output, layer.post_attention_norm)
            fused = layer.gate_up(normed)
            add_adapters(adapted, index, "gate_up", normed, fused)
            inner = operators.silu_mul(fused)
            output = layer.down(inner)
            add_adapters(adapted, index, "down", inner, output)
            normed = operators.add_norm(x, output, norm_after)
        if wanted is None or len(wanted) == len(normed):
            return normed
        return normed.index_select(0, upload(wanted, torch.int64, normed.device))

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits `[R, vocab]` of hidden states `[R, hidden]`, in the weights' dtype."""
        return self._weights.lm_head(hidden)


def choose_operators(config: ModelConfig, embedding: Table) -> Operators:
    """The fastest operators for a model in the dtype and on the device of its embedding.

    For batch-invariant ones see `invariant.invariant_operators`.
    """
    plain = TorchOperators(
        config.num_heads, config.num_kv_heads, config.head_dim, config.rms_norm_eps
    )
    device, dtype = embedding.device, embedding.dtype
    choose = cpu_kernels if device.type == "cpu" else cuda_operators
    kernels: Operators | None = choose(config, dtype)
    if kernels is None:
        return plain
    fault = find_fault(kernels, plain, config, dtype, device)
    if fault is None:
        return kernels
    logger.warning(
        "%s: not used, for they were wrong on trial (%s); steps run in plain torch, slower",
        type(kernels).__name__,
        fault,
    )
    return plain
