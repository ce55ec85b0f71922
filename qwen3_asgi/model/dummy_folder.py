"""Dummy weights as a checkpoint folder: the same model for this package and for another server."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file

from qwen3_asgi.model.checkpoint import INDEX_FILE
from qwen3_asgi.model.dummy import DummyCheckpoint
from qwen3_asgi.model.weights import EMBEDDING, LM_HEAD, tensor_shapes

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from qwen3_asgi.model.config import ModelConfig

SHARD_BYTES = 2 * 2**30
DTYPE = torch.bfloat16


def write_dummy_folder(folder: Path, config: ModelConfig, silent: Sequence[int]) -> int:
    """Write `config.json` and the weights of `DummyCheckpoint` in bfloat16; return their bytes.

    The vocabulary product's rows of the `silent` token ids are zero, so their logits are 0 where
    the best of many random ones is far above: greedy decoding never takes them. The weights are
    held in memory one shard of 2 GiB at a time.
    """
    folder.mkdir(parents=True, exist_ok=True)
    source = DummyCheckpoint(config, DTYPE, torch.device("cpu"))
    head = EMBEDDING if config.tie_word_embeddings else LM_HEAD
    file_of: dict[str, str] = {}
    shard: dict[str, torch.Tensor] = {}
    total = held = 0

    def flush() -> None:
        nonlocal shard, held
        file = f"model-{len(set(file_of.values())) + 1:05}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        file_of.update(dict.fromkeys(shard, file))
        shard, held = {}, 0

    for name in tensor_shapes(config):
        tensor = source.read(name)
        if name == head:
            tensor[list(silent)] = 0
        if shard and held + tensor.nbytes > SHARD_BYTES:
            flush()
        shard[name] = tensor
        held += tensor.nbytes
        total += tensor.nbytes
    flush()
    index = {"metadata": {"total_size": total}, "weight_map": file_of}
    (folder / INDEX_FILE).write_text(json.dumps(index), encoding="utf-8")
    text = json.dumps(config_json(config), indent=2)
    (folder / "config.json").write_text(text, encoding="utf-8")
    return total


def config_json(config: ModelConfig) -> dict[str, Any]:
    """What `config.json` says of a dense Qwen3 model without YaRN, in the keys of the hub."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        **sizes_json(config),
        "hidden_act": "silu",
        "attention_bias": False,
        "rope_theta": config.rope.theta,
        "rope_scaling": None,
        "torch_dtype": "bfloat16",
        "eos_token_id": list(config.eos_token_ids),
    }


def sizes_json(config: ModelConfig) -> dict[str, Any]:
    """The entries of `config.json` that are fields of a `ModelConfig` themselves."""
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        "tie_word_embeddings": config.tie_word_embeddings,
    }
