"""`config.json` and `generation_config.json` in, frozen values out.

Everything that this package cannot run is refused here, by name, before a weight is read.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from qwen3_asgi.errors import ModelLoadError
from qwen3_asgi.model.fp8.config import parse_quantization
from qwen3_asgi.model.rope_config import RopeConfig, parse_rope

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

SUPPORTED = (
    "supported are dense Qwen3 checkpoints (Qwen3ForCausalLM) in bf16, fp16, fp32 or block-wise fp8"
)
DTYPE_NAMES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a dense Qwen3 model. `dtype` is the checkpoint's, None when it does not say.

    `fp8`: matrices may be stored as float8 blocks, and `dtype` is that of what is not.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    rope: RopeConfig
    dtype: str | None
    eos_token_ids: tuple[int, ...]
    fp8: bool = False

    @property
    def max_context_tokens(self) -> int:
        """Longest sequence: the positions, or what YaRN stretches them to if that is more."""
        if self.rope.yarn is None:
            return self.max_position_embeddings
        # Qwen's own instructions add the YaRN entry and leave max_position_embeddings as it was.
        stretched = int(self.rope.yarn.original_max_position_embeddings * self.rope.yarn.factor)
        return max(self.max_position_embeddings, stretched)

    @property
    def num_parameters(self) -> int:
        """Weights of the model, a tied embedding counted once."""
        heads = self.num_heads + 2 * self.num_kv_heads
        attention = self.hidden_size * self.head_dim * (heads + self.num_heads)
        layer = attention + 3 * self.hidden_size * self.intermediate_size
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        return embeddings + self.num_layers * layer


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """What a request gets where it does not say. `top_k <= 0` means no limit.

    `do_sample` of the file is ignored, as vLLM does: a temperature of 0 in the request is greedy.
    """

    eos_token_ids: tuple[int, ...] = ()
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


def load_model_config(folder: Path) -> ModelConfig:
    """Parse `folder/config.json`.

    Raises:
        ModelLoadError: the file is missing, is not JSON, or describes a model that is not
            supported; the message names the file and the entry.
    """
    raw = read_json(folder / "config.json")
    try:
        return parse_model_config(raw)
    except ModelLoadError as error:
        raise ModelLoadError(f"{folder / 'config.json'}: {error}") from None


def parse_model_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Parse the content of a `config.json`, in transformers 4 or 5 spelling.

    Raises:
        ModelLoadError: an entry is missing or malformed, or asks for something unsupported.
    """
    _refuse_unsupported(raw)
    num_heads = _size(raw, "num_attention_heads")
    hidden_size = _size(raw, "hidden_size")
    head_dim = _size(raw, "head_dim", default=hidden_size // num_heads)
    num_kv_heads = _size(raw, "num_key_value_heads", default=num_heads)
    if num_heads % num_kv_heads:
        raise ModelLoadError(
            f"num_attention_heads ({num_heads}) must be a multiple of num_key_value_heads "
            f"({num_kv_heads})"
        )
    if head_dim % 2:
        raise ModelLoadError(f"head_dim must be even for rotary embeddings, got {head_dim}")
    positions = _size(raw, "max_position_embeddings")
    return ModelConfig(
        vocab_size=_size(raw, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_size(raw, "intermediate_size"),
        num_layers=_size(raw, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=_number(raw, "rms_norm_eps", 1e-6),
        max_position_embeddings=positions,
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        rope=parse_rope(raw, positions),
        dtype=_dtype(raw),
        eos_token_ids=_token_ids(raw.get("eos_token_id")),
        fp8=parse_quantization(raw),
    )


def load_generation_defaults(folder: Path, config: ModelConfig) -> GenerationDefaults:
    """Parse `folder/generation_config.json`; without one, take the end ids of `config`.

    Raises:
        ModelLoadError: the file is not JSON or an entry has the wrong type.
    """
    path = folder / "generation_config.json"
    if not path.exists():
        return GenerationDefaults(eos_token_ids=config.eos_token_ids)
    raw = read_json(path)
    try:
        return GenerationDefaults(
            eos_token_ids=_token_ids(raw.get("eos_token_id")) or config.eos_token_ids,
            temperature=_number(raw, "temperature", 1.0),
            top_k=int(_number(raw, "top_k", 0)),
            top_p=_number(raw, "top_p", 1.0),
            min_p=_number(raw, "min_p", 0.0),
        )
    except ModelLoadError as error:
        raise ModelLoadError(f"{path}: {error}") from None


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        ModelLoadError: the file is missing, unreadable, or holds something else.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelLoadError(f"the checkpoint has no {path.name}: {path} is missing") from None
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(content, dict):
        raise ModelLoadError(f"{path} must hold a JSON object, found {type(content).__name__}")
    return cast("dict[str, Any]", content)


def _refuse_unsupported(raw: Mapping[str, Any]) -> None:
    architectures = raw.get("architectures") or []
    model_type = raw.get("model_type")
    if architectures:
        if "Qwen3ForCausalLM" not in architectures:
            raise ModelLoadError(f"architecture {', '.join(map(str, architectures))}: {SUPPORTED}")
    elif model_type != "qwen3":
        raise ModelLoadError(f"model_type {model_type!r}: {SUPPORTED}")
    if raw.get("use_sliding_window") and raw.get("sliding_window"):
        raise ModelLoadError(f"use_sliding_window is not supported; {SUPPORTED}")
    other_layers = set(raw.get("layer_types") or ()) - {"full_attention"}
    if other_layers:
        raise ModelLoadError(f"layer_types {sorted(other_layers)} not supported; {SUPPORTED}")
    if raw.get("attention_bias"):
        raise ModelLoadError(f"attention_bias is not supported; {SUPPORTED}")
    if raw.get("hidden_act", "silu") != "silu":
        raise ModelLoadError(f"hidden_act {raw['hidden_act']!r} is not supported, only 'silu'")


def _size(raw: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = raw.get(key)
    if value is None:
        if default is None:
            raise ModelLoadError(f"entry {key!r} is missing")
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelLoadError(f"entry {key!r} must be a positive integer, found {value!r}")
    return value


def _number(raw: Mapping[str, Any], key: str, default: float) -> float:
    value = raw.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ModelLoadError(f"entry {key!r} must be a number, found {value!r}")
    return float(value)


def _dtype(raw: Mapping[str, Any]) -> str | None:
    value = raw.get("dtype") or raw.get("torch_dtype")
    if value is None:
        return None
    name = str(value).removeprefix("torch.")
    if name not in DTYPE_NAMES:
        raise ModelLoadError(f"dtype {name!r} is not supported, only {', '.join(DTYPE_NAMES)}")
    return name


def _token_ids(value: object) -> tuple[int, ...]:
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    if any(isinstance(token_id, bool) or not isinstance(token_id, int) for token_id in ids):
        raise ModelLoadError(f"entry 'eos_token_id' must be an id or a list of ids, found {value}")
    return tuple(ids)
