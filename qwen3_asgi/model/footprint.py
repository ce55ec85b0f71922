"""How much memory a loaded model is known to need: its weights and its KV pool."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch

from qwen3_asgi.model.cpu.linear import Int8Linear
from qwen3_asgi.model.executor import TorchExecutor
from qwen3_asgi.model.fp8.linear import Fp8Linear
from qwen3_asgi.model.quantization import PlainInt8Linear
from qwen3_asgi.model.weights import tensor_shapes

if TYPE_CHECKING:
    from qwen3_asgi.model.linear import LinearLayer
    from qwen3_asgi.scheduler.executor import ModelExecutor


class Footprint(NamedTuple):
    """Bytes. `weights`: every value once, in the type it is kept in. `tied_copy`: the embedding's
    second copy, packed for the vocabulary product; 0 where there is none."""

    weights: int
    tied_copy: int
    kv_pool: int


def footprint(executor: ModelExecutor) -> Footprint:
    """
    Raises:
        ValueError: this executor is not torch's.
        RuntimeError: it is closed.
    """
    if not isinstance(executor, TorchExecutor):
        raise ValueError(f"only torch's executor is known, not {type(executor).__name__}")
    config, wide = executor.model_config, executor.dtype.itemsize
    model, pool = executor._open()
    weights = model._weights
    table, head = weights.embedding, weights.lm_head
    vocabulary = config.vocab_size * config.hidden_size
    kept = sum(math.prod(shape) for shape in tensor_shapes(config).values()) * wide
    for layer in weights.layers:
        for linear in (layer.qkv, layer.output, layer.gate_up, layer.down):
            kept -= math.prod(linear.shape) * (wide - value_bytes(linear, wide))
    copy = 0
    if not config.tie_word_embeddings:
        kept -= vocabulary * (wide - value_bytes(head, wide))
    # One that is not packed shares its memory with the embedding.
    elif id(table) != id(head) and (
        getattr(head, "is_packed", False) or value_bytes(head, wide) < wide
    ):
        copy = vocabulary * value_bytes(head, wide)
    return Footprint(kept, copy, pool.bytes_per_block * pool.num_blocks)


def value_bytes(linear: LinearLayer, wide: int) -> int:
    """Bytes of one of its values; `wide` where they are in the model's dtype."""
    return 1 if isinstance(linear, Int8Linear | PlainInt8Linear | Fp8Linear) else wide


@torch.inference_mode()
def touch_pool(executor: ModelExecutor) -> None:
    """Write to all of the KV pool, so that it is in memory: it gets there only as it is used.

    Raises:
        ValueError: this executor is not torch's.
    """
    if not isinstance(executor, TorchExecutor):
        raise ValueError(f"only torch's executor is known, not {type(executor).__name__}")
    for layer in executor._open()[1].layers:
        for cache in layer:
            cache.zero_()
