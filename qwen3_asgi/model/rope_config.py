"""The rotary-embedding part of `config.json`, in both spellings that exist."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from qwen3_asgi.errors import ModelLoadError

if TYPE_CHECKING:
    from collections.abc import Mapping

# What transformers assumes when no file says anything.
DEFAULT_THETA = 10_000.0


@dataclass(frozen=True, slots=True)
class YarnConfig:
    """YaRN context extension (Peng et al. 2023, arXiv:2309.00071), static as transformers has it.

    `attention_factor` multiplies cos and sin. `truncate` rounds the ramp's bounds outwards.
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float
    beta_slow: float
    attention_factor: float
    truncate: bool


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """`yarn` is None for plain rotary embeddings."""

    theta: float
    yarn: YarnConfig | None = None


def parse_rope(raw: Mapping[str, Any], max_position_embeddings: int) -> RopeConfig:
    """Read `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (hub files).

    Raises:
        ModelLoadError: the type is neither "default" nor "yarn", or an entry is malformed.
    """
    entry = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if not isinstance(entry, dict):
        raise ModelLoadError(f"rope_parameters must be an object, found {entry!r}")
    if isinstance(entry.get("full_attention"), dict):
        entry = entry["full_attention"]
    kind = entry.get("rope_type", entry.get("type", "default"))
    theta = _positive("rope_theta", entry.get("rope_theta") or raw.get("rope_theta"), DEFAULT_THETA)
    partial = entry.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 1.0
    if partial != 1.0:
        raise ModelLoadError(f"partial_rotary_factor {partial} is not supported, only 1.0")
    if kind == "default":
        return RopeConfig(theta)
    if kind == "yarn":
        return RopeConfig(theta, _parse_yarn(entry, max_position_embeddings))
    raise ModelLoadError(f"rope_type {kind!r} is not supported, only 'default' and 'yarn'")


def _parse_yarn(entry: Mapping[str, Any], max_position_embeddings: int) -> YarnConfig:
    original = _positive(
        "original_max_position_embeddings",
        entry.get("original_max_position_embeddings"),
        max_position_embeddings,
    )
    factor = _positive("factor", entry.get("factor"), max_position_embeddings / original)
    attention_factor = entry.get("attention_factor")
    if attention_factor is None:
        mscale, all_dim = entry.get("mscale"), entry.get("mscale_all_dim")
        if mscale and all_dim:
            attention_factor = _magnitude(factor, mscale) / _magnitude(factor, all_dim)
        else:
            attention_factor = _magnitude(factor)
    return YarnConfig(
        factor=factor,
        original_max_position_embeddings=int(original),
        beta_fast=_positive("beta_fast", entry.get("beta_fast") or None, 32.0),
        beta_slow=_positive("beta_slow", entry.get("beta_slow") or None, 1.0),
        attention_factor=_positive("attention_factor", attention_factor, 1.0),
        truncate=bool(entry.get("truncate", True)),
    )


def _magnitude(factor: float, mscale: float = 1.0) -> float:
    """How much attention logits must be sharpened for a stretched context (YaRN, section 3.4)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _positive(key: str, value: object, default: float) -> float:
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise ModelLoadError(f"rope entry {key!r} must be a positive number, found {value!r}")
    return float(value)
