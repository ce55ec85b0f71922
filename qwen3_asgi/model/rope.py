"""Rotary position embeddings: a table of cos and sin, and the rotation of queries and keys."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from qwen3_asgi.model.rope_config import RopeConfig, YarnConfig

FIRST_TABLE_POSITIONS = 2048


class RotaryTable:
    """cos and sin of every position so far asked for, in float32.

    Several threads may look up at once: the table is replaced as a whole when it grows.
    """

    def __init__(self, config: RopeConfig, head_dim: int, device: torch.device) -> None:
        self._inverse_frequency = inverse_frequencies(config, head_dim).to(device)
        self._scale = config.yarn.attention_factor if config.yarn else 1.0
        self._table = self._compute(FIRST_TABLE_POSITIONS)

    def lookup(self, positions: Tensor, last: int) -> tuple[Tensor, Tensor]:
        """Return cos and sin, each float32 `[T, 1, head_dim]`, for int64 `positions` `[T]`.

        `last` is the highest position, known to the caller without asking the device. The first
        half of the sines is negated, as `rotate` wants it.
        """
        table = self._table
        if last >= len(table[0]):
            table = self._table = self._compute(max(last + 1, 2 * len(table[0])))
        cos, sin = table
        return cos.index_select(0, positions), sin.index_select(0, positions)

    def _compute(self, num_positions: int) -> tuple[Tensor, Tensor]:
        device = self._inverse_frequency.device
        positions = torch.arange(num_positions, dtype=torch.float32, device=device)
        angles = torch.outer(positions, self._inverse_frequency)
        cos, sin = angles.cos() * self._scale, angles.sin() * self._scale
        return (
            torch.cat((cos, cos), dim=-1).unsqueeze(1),
            torch.cat((-sin, sin), dim=-1).unsqueeze(1),
        )


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate `x` `[T, heads, head_dim]` (the two halves of a head form the pairs).

    Computed in float32, returned in the dtype of `x`.
    """
    half = x.shape[-1] // 2
    # Converted once up front: operators that mix dtypes take twice as long.
    wide = x.float()
    swapped = torch.cat((wide[..., half:], wide[..., :half]), dim=-1)
    return (wide * cos).addcmul_(swapped, sin).to(x.dtype)


def inverse_frequencies(config: RopeConfig, head_dim: int) -> Tensor:
    """Return the angle per position of each pair, float32 `[head_dim / 2]`.

    Plain: theta^(-2i/d), from Su et al. 2021 (arXiv:2104.09864). With YaRN (arXiv:2309.00071,
    section 3.2) the pairs that turn rarely within the original context are slowed down by
    `factor`, those that turn often are left alone, and a linear ramp joins both.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    plain = 1.0 / config.theta**exponents
    if config.yarn is None:
        return plain
    stretched = 1.0 / (config.yarn.factor * config.theta**exponents)
    low, high = _ramp_bounds(config.yarn, config.theta, head_dim)
    pairs = torch.arange(head_dim // 2, dtype=torch.float32)
    ramp = ((pairs - low) / (high - low)).clamp(0, 1)
    keep = 1 - ramp
    return stretched * (1 - keep) + plain * keep


def _ramp_bounds(yarn: YarnConfig, theta: float, head_dim: int) -> tuple[float, float]:
    def pair_with_turns(turns: float) -> float:
        """The (fractional) pair that makes this many turns in the original context."""
        wavelengths = yarn.original_max_position_embeddings / (turns * 2 * math.pi)
        return head_dim * math.log(wavelengths) / (2 * math.log(theta))

    low, high = pair_with_turns(yarn.beta_fast), pair_with_turns(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    return low, high if high != low else high + 0.001
