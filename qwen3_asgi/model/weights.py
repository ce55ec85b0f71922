"""A checkpoint's tensors in, the model's weights out: fused, converted, one copy of each."""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from qwen3_asgi.model.cpu.linear import PanelLinear
from qwen3_asgi.model.fp8.checkpoint import Fp8Checkpoint
from qwen3_asgi.model.fp8.linear import Fp8Linear, fit, multiplies_fp8
from qwen3_asgi.model.linear import Linear, PlainTable

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
    from typing import Protocol

    from qwen3_asgi.model.config import ModelConfig
    from qwen3_asgi.model.linear import LinearLayer, Table

    class TensorSource(Protocol):
        """What `load_weights` reads: a `Checkpoint`, or what takes its place."""

        def check(
            self, shapes: Mapping[str, Sequence[int]], ignored: Collection[str] = ()
        ) -> None: ...

        def read(self, name: str) -> torch.Tensor: ...


EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
LM_HEAD = "lm_head.weight"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer. N query heads, K key/value heads, D head_dim.

    `qkv` is `[(N + 2K) * D, hidden]`: queries, keys, values. `gate_up` is
    `[2 * intermediate, hidden]`. `qk_norm` is `[N + K, D]`: the query norm's weight once per query
    head, then the key norm's, so that both are applied in one pass.
    """

    input_norm: torch.Tensor
    qkv: LinearLayer
    qk_norm: torch.Tensor
    output: LinearLayer
    post_attention_norm: torch.Tensor
    gate_up: LinearLayer
    down: LinearLayer


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """A tied `embedding` `[vocab, hidden]` is `lm_head` itself where its layout allows, else
    `lm_head` may be a second, packed copy of it."""

    embedding: Table
    layers: tuple[LayerWeights, ...]
    final_norm: torch.Tensor
    lm_head: LinearLayer


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return name and shape of every tensor that a checkpoint of `config` must hold."""
    hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    queries, keys = config.num_heads * dim, config.num_kv_heads * dim
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, hidden)}
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        shapes |= {
            prefix + "input_layernorm.weight": (hidden,),
            prefix + "self_attn.q_proj.weight": (queries, hidden),
            prefix + "self_attn.k_proj.weight": (keys, hidden),
            prefix + "self_attn.v_proj.weight": (keys, hidden),
            prefix + "self_attn.q_norm.weight": (dim,),
            prefix + "self_attn.k_norm.weight": (dim,),
            prefix + "self_attn.o_proj.weight": (hidden, queries),
            prefix + "post_attention_layernorm.weight": (hidden,),
            prefix + "mlp.gate_proj.weight": (inner, hidden),
            prefix + "mlp.up_proj.weight": (inner, hidden),
            prefix + "mlp.down_proj.weight": (hidden, inner),
        }
    shapes[FINAL_NORM] = (hidden,)
    if not config.tie_word_embeddings:
        shapes[LM_HEAD] = (config.vocab_size, hidden)
    return shapes


def load_weights(
    checkpoint: TensorSource,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    linear: Callable[[torch.Tensor], LinearLayer] = Linear,
) -> ModelWeights:
    """Read, check, fuse and convert all weights. Shows progress when stderr is a terminal.

    `linear` makes a layer of a weight, which it may keep or copy.

    Raises:
        ModelLoadError: a tensor is missing, unexpected, or of the wrong shape or type.
    """
    # Tied checkpoints on the hub often carry a redundant lm_head.weight.
    checkpoint.check(
        tensor_shapes(config), ignored=(LM_HEAD,) if config.tie_word_embeddings else ()
    )

    reader = _Reader(checkpoint, dtype, device, linear)
    embedding = reader.tensor(EMBEDDING)
    lm_head = reader.dense(embedding) if config.tie_word_embeddings else reader.linear(LM_HEAD)
    layers = tuple(
        _load_layer(f"model.layers.{layer}.", config, reader)
        for layer in _with_progress(config.num_layers)
    )
    table: Table = PlainTable(embedding)
    if config.tie_word_embeddings and isinstance(lm_head, PanelLinear):
        table = lm_head
    return ModelWeights(table, layers, reader.tensor(FINAL_NORM), lm_head)


class _Reader:
    """Takes tensors out of a source, into `dtype` on `device` or left in float8 where that runs."""

    def __init__(
        self,
        source: TensorSource,
        dtype: torch.dtype,
        device: torch.device,
        dense: Callable[[torch.Tensor], LinearLayer],
    ) -> None:
        self.dense = dense
        self._source = source
        self._dtype = dtype
        self._device = device
        self._stored_fp8 = source if isinstance(source, Fp8Checkpoint) else None
        self._multiplies_fp8 = False
        if self._stored_fp8 is not None:
            self._multiplies_fp8 = dense is Linear and multiplies_fp8(device, dtype)
            logger.info(
                "float8 weights are %s",
                "multiplied as they are" if self._multiplies_fp8 else f"converted to {dtype}",
            )

    def tensor(self, name: str, *, copy: bool = True) -> torch.Tensor:
        """One tensor; without `copy` it may share memory with the file."""
        stored = self._stored_fp8
        if stored is not None and stored.has_blocks(name):
            # First to the device: one byte a value is moved, and the device does the work.
            return stored.blocks(name).to(self._device).dequantize(self._dtype)
        return self._source.read(name).to(device=self._device, dtype=self._dtype, copy=copy)

    def linear(self, *names: str) -> LinearLayer:
        """One layer of the matrices `names`, stacked along its outputs."""
        stored = self._stored_fp8
        if self._multiplies_fp8 and stored is not None and all(map(stored.has_blocks, names)):
            parts = [stored.blocks(name).to(self._device) for name in names]
            if fit(parts):
                return Fp8Linear(parts)
        if len(names) == 1:
            return self.dense(self.tensor(*names))
        # cat copies, so the parts need none of their own.
        return self.dense(torch.cat([self.tensor(name, copy=False) for name in names]))


def _load_layer(prefix: str, config: ModelConfig, reader: _Reader) -> LayerWeights:
    read, linear = reader.tensor, reader.linear
    attention, mlp = prefix + "self_attn.", prefix + "mlp."
    query_norm = read(attention + "q_norm.weight").expand(config.num_heads, -1)
    key_norm = read(attention + "k_norm.weight").expand(config.num_kv_heads, -1)
    return LayerWeights(
        input_norm=read(prefix + "input_layernorm.weight"),
        qkv=linear(*(f"{attention}{part}_proj.weight" for part in "qkv")),
        qk_norm=torch.cat((query_norm, key_norm)),
        output=linear(attention + "o_proj.weight"),
        post_attention_norm=read(prefix + "post_attention_layernorm.weight"),
        gate_up=linear(mlp + "gate_proj.weight", mlp + "up_proj.weight"),
        down=linear(mlp + "down_proj.weight"),
    )


def _with_progress(num_layers: int) -> Iterator[int]:
    stream = sys.stderr
    show = stream is not None and stream.isatty()
    for layer in range(num_layers):
        yield layer
        if show:
            end = "\n" if layer + 1 == num_layers else ""
            stream.write(f"\rloading weights: layer {layer + 1} of {num_layers}{end}")
            stream.flush()
