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

from safetensors import SafetensorError
from safetensors.torch import load

from qwen3_asgi.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch

    from qwen3_asgi.model.config import ModelConfig

    # [T, in] -> [T, out]
    Product = Callable[[torch.Tensor], torch.Tensor]

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
MAX_RANK = 256
MAX_ALPHA = 1e6
MAX_CONFIG_BYTES = 1 << 20
# Room for the names and shapes at the beginning of a file of weights.
_HEADER_BYTES = 1 << 20
_KEY = re.compile(
    r"base_model\.model\.model\.layers\.(\d{1,4})\.((?:self_attn|mlp)\.(\w+))\.lora_([AB])\.weight"
)
# Patterns of a stranger's adapter must not take for ever: few repetitions, and none of a group.
_MAX_NAME_CHARS = 256
_MAX_REPETITIONS = 3
_SLOW = re.compile(r"\(\?|\)[*+?{]")
_REPETITION = re.compile(r"[*+?{]")
_MAX_MESSAGE_CHARS = 500
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
    columns from `start` on. `products` are what multiplies with both, if that is not torch."""

    a: torch.Tensor
    b: torch.Tensor
    start: int
    products: tuple[Product, Product] | None = None

    def to(self, device: torch.device, dtype: torch.dtype) -> Part:
        return Part(self.a.to(device, dtype), self.b.to(device, dtype), self.start)

    def multiplied_by(self, linear: Callable[[torch.Tensor], Product]) -> Part:
        return self._replace(products=(linear(self.a), linear(self.b)))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`x` `[n, in]` to `[n, out]`."""
        if self.products is None:
            return (x @ self.a.T) @ self.b.T
        first, second = self.products
        return second(first(x))


@dataclass(frozen=True, slots=True)
class Adapter:
    """`layers[i]` has the parts of each fused layer that the adapter changes."""

    layers: tuple[Mapping[str, tuple[Part, ...]], ...]

    @property
    def rank(self) -> int:
        """The greatest of its modules'."""
        return max(
            len(part.a) for layer in self.layers for parts in layer.values() for part in parts
        )

    def to(self, device: torch.device, dtype: torch.dtype) -> Adapter:
        return self._each(lambda part: part.to(device, dtype))

    def multiplied_by(self, linear: Callable[[torch.Tensor], Product]) -> Adapter:
        """With products that `linear` makes of a matrix `[out, in]`, in place of torch's."""
        return self._each(lambda part: part.multiplied_by(linear))

    def _each(self, change: Callable[[Part], Part]) -> Adapter:
        return Adapter(
            tuple(
                {fused: tuple(map(change, parts)) for fused, parts in layer.items()}
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
        for part in parts:
            y.narrow(1, part.start, len(part.b)).index_add_(0, rows, part(own))


def read_adapter(read: Callable[[str, int], bytes], config: ModelConfig) -> tuple[Adapter, str]:
    """Read a PEFT adapter for a model of `config`; returns it (float32, CPU) and its fingerprint.

    `read` returns the content of a file, given its name and its greatest size. Each is read once:
    a fingerprint that is not of these very bytes would let other weights use their prefix cache.

    Raises:
        InvalidRequest: it is no LoRA adapter for this model; the message says why.
    """
    written = read(CONFIG_FILE, MAX_CONFIG_BYTES)
    settings = _parse_settings(written)
    weights = read(WEIGHTS_FILE, _HEADER_BYTES + 4 * _max_weights(config))
    digest = blake2b(len(written).to_bytes(8, "little") + written, digest_size=16)
    digest.update(weights)
    try:
        tensors = load(weights)
    except (SafetensorError, LookupError, TypeError, ValueError) as error:
        raise _wrong(f"{WEIGHTS_FILE} cannot be read: {error}") from error
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            raise _wrong(f"tensor {name[:_MAX_NAME_CHARS]!r} has the type {tensor.dtype}")
        tensors[name] = tensor.float()
    return _build(tensors, settings, config), digest.hexdigest()


def _max_weights(config: ModelConfig) -> int:
    """How many the largest adapter has that this model can take."""
    sizes = (out + into for _, out, into in (_place(module, config) for module in FUSED))
    return config.num_layers * MAX_RANK * sum(sizes)


def _parse_settings(written: bytes) -> dict[str, Any]:
    try:
        settings = json.loads(written)
    except (ValueError, RecursionError) as error:
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
            raise _wrong(
                f"tensor {name[:_MAX_NAME_CHARS]!r} adapts no module of a layer ({allowed})"
            )
        index = int(match[1])
        if index >= config.num_layers:
            raise _wrong(
                f"tensor {name[:_MAX_NAME_CHARS]!r}: the model has {config.num_layers} layers"
            )
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
    if not isinstance(alpha, (int, float)) or not abs(alpha) <= MAX_ALPHA:
        raise _wrong(f"{name}: lora_alpha must be a number up to {MAX_ALPHA:g}, got {alpha!r}")
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
    patterns = settings.get(key) or {}
    if not isinstance(patterns, dict):
        raise _wrong(f"{key} must be an object, got {patterns!r}")
    for pattern, value in patterns.items():
        if (
            len(pattern) > _MAX_NAME_CHARS
            or _SLOW.search(pattern)
            or len(_REPETITION.findall(pattern)) > _MAX_REPETITIONS
        ):
            raise _wrong(f"{key} has {pattern[:_MAX_NAME_CHARS]!r}, which is too complicated")
        try:
            matches = re.match(rf"(.*\.)?({pattern})$", name)
        except re.error as error:
            raise _wrong(
                f"{key} has {pattern[:_MAX_NAME_CHARS]!r}, which is no pattern: {error}"
            ) from error
        if matches:
            return value
    return default


def _wrong(message: str) -> InvalidRequest:
    return InvalidRequest(message[:_MAX_MESSAGE_CHARS], param="lora_path", code="invalid_adapter")
