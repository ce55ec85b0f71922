"""Small checkpoints in float8 blocks, and the same weights multiplied out by hand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file

from tests.model.checkpoints import edit_config, write_checkpoint

if TYPE_CHECKING:
    from pathlib import Path

QUANTIZATION = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "modules_to_not_convert": ["lm_head", "model.layers.0.input_layernorm"],
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}
# Blocks cut off at both edges, and parts of fused layers that end inside a block.
RAGGED = {
    "hidden_size": 200,
    "intermediate_size": 330,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
}
# As in the published models, every part ends with a block; inputs are multiples of four blocks.
EVEN = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 2,
}
SIZES = {"one_block": {}, "ragged": RAGGED, "even": EVEN}


class Pair(NamedTuple):
    """Folders of the same model: in float8, and in float32."""

    fp8: Path
    plain: Path


def quantize(weight: torch.Tensor, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Float8 values and the scales of 128 x 128 blocks, no two of which are alike."""
    rows, columns = (-(-size // 128) for size in weight.shape)
    values = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    scales = torch.empty(rows, columns)
    for i in range(rows):
        for j in range(columns):
            block = (slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128))
            scales[i, j] = weight[block].abs().max() / 448
            values[block] = (weight[block] / scales[i, j]).to(torch.float8_e4m3fn)
    # Normally distributed blocks have nearly the same scale: then mixing them up hardly shows.
    generator = torch.Generator().manual_seed(seed)
    return values, scales * (0.4 + torch.rand(scales.shape, generator=generator))


def by_hand(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """What the blocks stand for, looked up value by value, in float32."""
    rows, columns = (torch.arange(size) // 128 for size in values.shape)
    return values.float() * scales.float()[rows[:, None], columns[None, :]]


def write_pair(folder: Path, size: str, kind: str = "tied", scales_type: Any = None) -> Pair:
    """Write a checkpoint of one of `SIZES` twice; `scales_type` is that of the scales' file."""
    plain, fp8 = (write_checkpoint(folder / name, kind, **SIZES[size]) for name in ("plain", "fp8"))
    seed = 0
    for path in sorted(fp8.glob("*.safetensors")):
        stored, exact = {}, {}
        for name, tensor in load_file(path).items():
            exact[name] = stored[name] = tensor
            if name.endswith("_proj.weight"):
                seed += 1
                values, scales = quantize(tensor, seed)
                stored[name] = values
                stored[name + "_scale_inv"] = scales = scales.to(scales_type or torch.float32)
                exact[name] = by_hand(values, scales)
        save_file(stored, path, metadata={"format": "pt"})
        save_file(exact, plain / path.name, metadata={"format": "pt"})
    edit_config(fp8, lambda raw: raw.update(quantization_config=QUANTIZATION))
    return Pair(fp8, plain)


def separate_scales(folder: Path) -> None:
    """Rewrite a folder to two shards, scales in one and all else in the other."""
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(path)
        path.unlink()
    shards: tuple[dict[str, torch.Tensor], ...] = ({}, {})
    for name, tensor in tensors.items():
        shards[name.endswith("_scale_inv")][name] = tensor
    names = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    for name, shard in zip(names, shards, strict=True):
        save_file(shard, folder / name, metadata={"format": "pt"})
    weight_map = {key: names[key.endswith("_scale_inv")] for key in tensors}
    index = folder / "model.safetensors.index.json"
    index.write_text("{}")
    edit_config(folder, lambda raw: raw.update(weight_map=weight_map), index.name)


def rewrite(folder: Path, edit: Any) -> None:
    """Apply `edit` to the tensors of a folder with one file."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path, metadata={"format": "pt"})
