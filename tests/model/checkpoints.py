"""Small random Qwen3 checkpoints, written by transformers itself."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from qwen3_asgi.config import EngineConfig
from qwen3_asgi.model.executor import load_executor

if TYPE_CHECKING:
    from pathlib import Path

    from qwen3_asgi.model.executor import TorchExecutor

VOCAB = 320
KINDS = ("tied", "untied_sharded", "yarn")
SPELLINGS = ("old_keys", "new_keys")

# heads * head_dim = 64 differs from hidden 48, as in Qwen3-0.6B, 4B and 32B.
BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "eos_token_id": 7,
    # Wide enough that logits are spread and greedy continuations wander.
    "initializer_range": 0.2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}


def write_checkpoint(folder: Path, kind: str, spelling: str = "new_keys", **sizes: int) -> Path:
    """Write one of `KINDS` in float32 and return its folder; `sizes` replace those of `BASE`."""
    entries = BASE | {"tie_word_embeddings": kind == "tied"} | sizes
    if kind == "yarn":
        entries["rope_parameters"] = dict(YARN)
    torch.manual_seed(1)
    model = Qwen3ForCausalLM(Qwen3Config(**entries)).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:  # all ones at the start: a forgotten norm weight would not show
                weight.uniform_(0.5, 1.5)
            elif "proj" in name:  # layers outweigh the embedding, or a tied model echoes its input
                weight.mul_(3)
    model.save_pretrained(folder, max_shard_size="60KB" if kind == "untied_sharded" else "1GB")
    if spelling == "old_keys":
        edit_config(folder, _to_old_keys)
    return folder


def edit_config(folder: Path, edit: Any, name: str = "config.json") -> None:
    """Apply `edit` to the JSON object in place."""
    path = folder / name
    raw = json.loads(path.read_text())
    edit(raw)
    path.write_text(json.dumps(raw))


def _to_old_keys(raw: dict[str, Any]) -> None:
    rope = raw.pop("rope_parameters")
    raw["rope_theta"] = rope.pop("rope_theta")
    raw["rope_scaling"] = rope if rope["rope_type"] == "yarn" else None
    raw["torch_dtype"] = raw.pop("dtype")


def load_reference(folder: Path) -> Qwen3ForCausalLM:
    """What the numbers are compared with."""
    model = Qwen3ForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval()


@torch.inference_mode()
def reference_logits(model: Qwen3ForCausalLM, tokens: list[int]) -> torch.Tensor:
    """Logits `[T, vocab]` of every position."""
    logits: torch.Tensor = model(torch.tensor([tokens])).logits[0]
    return logits


def greedy(model: Qwen3ForCausalLM, prompt: list[int], count: int) -> list[int]:
    """The reference's greedy continuation."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(reference_logits(model, tokens)[-1].argmax()))
    return tokens[len(prompt) :]


def load(folder: Path, **settings: Any) -> TorchExecutor:
    """Load a small executor on the CPU: 4-token blocks, 64 of them unless told otherwise."""
    settings = {"device": "cpu", "block_size": 4, "num_kv_blocks": 64} | settings
    return load_executor(folder, EngineConfig(**settings), owned_token_ids=VOCAB)
