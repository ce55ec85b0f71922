"""Adapters made by PEFT itself, that really change what a model says."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch

from tests.model.checkpoints import load_reference

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from transformers import Qwen3ForCausalLM


def make_adapter(
    checkpoint: Path, settings: Mapping[str, Any], path: Path, *, seed: int, size: float = 0.3
) -> Qwen3ForCausalLM:
    """Write an adapter for a checkpoint; returns the merged model. `size` bounds its weights B."""
    import peft

    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT's own use of what transformers has deprecated
        model = peft.get_peft_model(load_reference(checkpoint), peft.LoraConfig(**settings))
        with torch.no_grad():
            for parameter, weight in model.named_parameters():
                if "lora_B" in parameter:  # zero at the start: an adapter that does nothing
                    weight.uniform_(-size, size)
        model.save_pretrained(str(path))
    merged: Qwen3ForCausalLM = model.merge_and_unload().eval()  # type: ignore[assignment]
    return merged
