"""A checkpoint's tensors in, the model's weights out: fused, converted, one copy of each."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from qwen3_asgi.model.linear import Linear

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
    from typing import Protocol

    from qwen3_asgi.model.config import ModelConfig

    class TensorSource(Protocol):
        """What `load_weights` reads: a `Checkpoint`, or what takes its place."""

        def check(
            self, shapes: Mapping[str, Sequence[int]], ignored: Collection[str] = ()
        ) -> None: ...

        def read(self, name: str) -> torch.Tensor: ...


EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
LM_HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer. N query heads, K key/value heads, D head_dim.

    `qkv` is `[(N + 2K) * D, hidden]`: queries, keys, values. `gate_up` is
    `[2 * intermediate, hidden]`. `qk_norm` is `[N + K, D]`: the query norm's weight once per query
    head, then the key norm's, so that both are applied in one pass.
    """

    input_norm: torch.Tensor
    qkv: Linear
    qk_norm: torch.Tensor
    output: Linear
    post_attention_norm: torch.Tensor
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """`embedding` is `[vocab, hidden]`; `lm_head` is a second, packed copy of it when tied."""

    embedding: torch.Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: torch.Tensor
    lm_head: Linear


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
    checkpoint: TensorSource, config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> ModelWeights:
    """Read, check, fuse and convert all weights. Shows progress when stderr is a terminal.

    Raises:
        ModelLoadError: a tensor is missing, unexpected, or of the wrong shape or type.
    """
    # Tied checkpoints on the hub often carry a redundant lm_head.weight.
    checkpoint.check(
        tensor_shapes(config), ignored=(LM_HEAD,) if config.tie_word_embeddings else ()
    )

    def read(name: str) -> torch.Tensor:
        return checkpoint.read(name).to(device=device, dtype=dtype, copy=True)

    def fuse(*names: str) -> Linear:
        # cat copies, so the parts need none of their own.
        parts = [checkpoint.read(name).to(device=device, dtype=dtype) for name in names]
        return Linear(torch.cat(parts))

    embedding = read(EMBEDDING)
    lm_head = Linear(embedding if config.tie_word_embeddings else read(LM_HEAD))
    layers = tuple(
        _load_layer(f"model.layers.{layer}.", config, read, fuse)
        for layer in _with_progress(config.num_layers)
    )
    return ModelWeights(embedding, layers, read(FINAL_NORM), lm_head)


def _load_layer(
    prefix: str,
    config: ModelConfig,
    read: Callable[[str], torch.Tensor],
    fuse: Callable[..., Linear],
) -> LayerWeights:
    attention, mlp = prefix + "self_attn.", prefix + "mlp."
    query_norm = read(attention + "q_norm.weight").expand(config.num_heads, -1)
    key_norm = read(attention + "k_norm.weight").expand(config.num_kv_heads, -1)
    return LayerWeights(
        input_norm=read(prefix + "input_layernorm.weight"),
        qkv=fuse(*(f"{attention}{part}_proj.weight" for part in "qkv")),
        qk_norm=torch.cat((query_norm, key_norm)),
        output=Linear(read(attention + "o_proj.weight")),
        post_attention_norm=read(prefix + "post_attention_layernorm.weight"),
        gate_up=fuse(mlp + "gate_proj.weight", mlp + "up_proj.weight"),
        down=Linear(read(mlp + "down_proj.weight")),
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
