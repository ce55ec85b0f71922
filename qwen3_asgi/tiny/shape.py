"""The architecture of the tiny model and the two configuration files beside its weights."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from .tokenizer import MAX_CONTEXT_TOKENS

if TYPE_CHECKING:
    from pathlib import Path

OWNED_TOKENS = 1900
VOCABULARY_ROWS = 1984
"""A multiple of 64; the rows beyond the owned tokens belong to none, as in the big models."""


def model_config(end: int, stop: int) -> dict[str, object]:
    """`end` closes a chat turn, `stop` closes a text."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "eos_token_id": end,
        "pad_token_id": stop,
        "head_dim": 32,
        "hidden_act": "silu",
        "hidden_size": 192,
        "initializer_range": 0.02,
        "intermediate_size": 512,
        "max_position_embeddings": MAX_CONTEXT_TOKENS,
        "num_attention_heads": 8,
        "num_hidden_layers": 5,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": VOCABULARY_ROWS,
    }


def generation_config(end: int, stop: int) -> dict[str, object]:
    return {
        "do_sample": True,
        "eos_token_id": [end, stop],
        "pad_token_id": stop,
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
    }


def save_configs(folder: Path, end: int, stop: int) -> None:
    for name, content in (
        ("config.json", model_config(end, stop)),
        ("generation_config.json", generation_config(end, stop)),
    ):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
