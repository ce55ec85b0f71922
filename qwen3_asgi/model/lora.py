"""LoRA adapters: a PEFT folder in, small matrices beside the fused weights out, several in a batch.

`y = x W^T + scale * (x A^T) B^T` (Hu et al. 2021, arXiv:2106.09685), with `scale = alpha / r`, or
`alpha / sqrt(r)` for rank-stabilised adapters (Kalajdzievski 2023, arXiv:2312.03732).
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, NamedTuple

from safetensors import SafetensorError, safe_open

from qwen3_asgi.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    import torch

    from qwen3_asgi.model.config import ModelConfig

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
MAX_RANK = 256
_CHUNK_BYTES = 1 << 20
_KEY = re.compile(
    r"base_model\.model\.model\.layers\.(\d+)\.((?:self_attn|mlp)\.(\w+))\.lora_([AB])\.weight"
)
# PEFT module -> the fused layer that holds it.
FUSED = {
    "q_proj": "qkv",
    "k_proj": "qkv",
    "v_proj": "qkv",
    "o_proj": "output",
    "gate_proj": "gate_up",
    "up_proj": "gate_up",
    "down_proj": "down",
}


class Part(NamedTuple):
    """One adapted module: `a` `[r, in]`, `b` `[out, r]` times the scale, for the fused layer's
    columns from `start` on."""

    a: torch.Tensor
    b: torch.Tensor
    start: int

    def to(self, device: torch.device, dtype: torch.dtype) -> Part:
        return Part(self.a.to(device, dtype), self.b.to(device, dtype), self.start)


@dataclass(frozen=True, slots=True)
class Adapter:
    """`layers[i]` has the parts of each fused layer that the adapter changes."""

    layers: tuple[Mapping[str, tuple[Part, ...]], ...]

    def to(self, device: torch.device, dtype: torch.dtype) -> Adapter:
        return Adapter(
            tuple(
                {
                    fused: tuple(part.to(device, dtype) for part in parts)
                    for fused, parts in layer.items()
                }
                for layer in self.layers
            )
        )


class AdaptedRows(NamedTuple):
    """The rows of a batch, int64 `[n]`, that run with one adapter."""

    adapter: Adapter
    rows: torch.Tensor


def add_adapters(
    adapted: Sequence[AdaptedRows], layer: int, fused: str, x: torch.Tensor, y: torch.Tensor
) -> None:
    """Add what the adapters of a batch make of `x` `[T, in]` to `y` `[T, out]`, in place."""
    for adapter, rows in adapted:
        parts = adapter.layers[layer].get(fused)
        if not parts:
            continue
        own = x.index_select(0, rows)
        for a, b, start in parts:
            delta = (own @ a.T) @ b.T
            y.narrow(1, start, len(b)).index_add_(0, rows, delta)


def read_adapter(folder: Path, config: ModelConfig) -> tuple[Adapter, str]:
    """Read a PEFT adapter for a model of `config`; returns it (float32, CPU) and its fingerprint.

    Raises:
        InvalidRequest: it is no LoRA adapter for this model; the message says why.
    """
    settings = _read_settings(folder / CONFIG_FILE)
    path = folder / WEIGHTS_FILE
    if not path.is_file():
        raise _wrong(f"{WEIGHTS_FILE} is missing; only safetensors are read")
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name).float() for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise _wrong(f"{WEIGHTS_FILE} cannot be read: {error}") from error
    return _build(tensors, settings, config), _fingerprint(folder)


def _read_settings(path: Path) -> dict[str, Any]:
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _wrong(f"{CONFIG_FILE} cannot be read: {error}") from error
    if not isinstance(settings, dict) or settings.get("peft_type") != "LORA":
        raise _wrong(f"{CONFIG_FILE} does not describe a LoRA adapter")
    for name in ("use_dora", "fan_in_fan_out", "lora_bias", "use_qalora"):
        if settings.get(name):
            raise _wrong(f"{name} is not supported")
    if settings.get("bias", "none") != "none":
        raise _wrong("adapted biases are not supported: the model has none")
    if settings.get("modules_to_save"):
        raise _wrong(f"modules_to_save is not supported, got {settings['modules_to_save']}")
    return settings


def _build(
    tensors: Mapping[str, torch.Tensor], settings: Mapping[str, Any], config: ModelConfig
) -> Adapter:
    pairs: dict[tuple[int, str], dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        match = _KEY.fullmatch(name)
        if match is None or match[3] not in FUSED:
            allowed = ", ".join(FUSED)
            raise _wrong(f"tensor {name!r} adapts no module of a layer ({allowed})")
        index = int(match[1])
        if index >= config.num_layers:
            raise _wrong(f"tensor {name!r}: the model has {config.num_layers} layers")
        pairs.setdefault((index, match[2]), {})[match[4]] = tensor
    if not pairs:
        raise _wrong("the adapter is empty")
    layers: list[dict[str, tuple[Part, ...]]] = [{} for _ in range(config.num_layers)]
    for (index, path), pair in sorted(pairs.items()):
        module = path.rpartition(".")[2]
        part = _part(f"model.layers.{index}.{path}", module, pair, settings, config)
        fused = layers[index]
        fused[FUSED[module]] = (*fused.get(FUSED[module], ()), part)
    return Adapter(tuple(layers))


def _part(
    name: str,
    module: str,
    pair: Mapping[str, torch.Tensor],
    settings: Mapping[str, Any],
    config: ModelConfig,
) -> Part:
    if set(pair) != {"A", "B"}:
        raise _wrong(f"{name}: lora_A and lora_B must both be there")
    a, b = pair["A"], pair["B"]
    rank = _pattern(settings, "rank_pattern", name, settings.get("r"))
    alpha = _pattern(settings, "alpha_pattern", name, settings.get("lora_alpha"))
    if not isinstance(rank, int) or not 1 <= rank <= MAX_RANK:
        raise _wrong(f"{name}: the rank must be 1 to {MAX_RANK}, got {rank!r}")
    if not isinstance(alpha, (int, float)):
        raise _wrong(f"{name}: lora_alpha must be a number, got {alpha!r}")
    start, out, into = _place(module, config)
    if tuple(a.shape) != (rank, into) or tuple(b.shape) != (out, rank):
        raise _wrong(
            f"{name}: lora_A is {tuple(a.shape)} and lora_B {tuple(b.shape)}, this model with rank "
            f"{rank} needs {(rank, into)} and {(out, rank)}"
        )
    scale = alpha / (rank**0.5 if settings.get("use_rslora") else rank)
    return Part(a.contiguous(), (b * scale).contiguous(), start)


def _place(module: str, config: ModelConfig) -> tuple[int, int, int]:
    """First column in the fused layer, number of columns, and size of the input."""
    hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    queries, keys = config.num_heads * dim, config.num_kv_heads * dim
    return {
        "q_proj": (0, queries, hidden),
        "k_proj": (queries, keys, hidden),
        "v_proj": (queries + keys, keys, hidden),
        "o_proj": (0, hidden, queries),
        "gate_proj": (0, inner, hidden),
        "up_proj": (inner, inner, hidden),
        "down_proj": (0, hidden, inner),
    }[module]


def _pattern(settings: Mapping[str, Any], key: str, name: str, default: object) -> object:
    """PEFT's per-module overrides: the first pattern that ends the module's name."""
    for pattern, value in (settings.get(key) or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", name):
            return value
    return default


def _fingerprint(folder: Path) -> str:
    digest = blake2b(digest_size=16)
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        with (folder / name).open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
    return digest.hexdigest()


def _wrong(message: str) -> InvalidRequest:
    return InvalidRequest(message, param="lora_path", code="invalid_adapter")
