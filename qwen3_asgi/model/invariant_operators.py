"""The plain operators in one order, for CPUs without the compiled kernels.

Attention takes queries and keys in tiles that begin at multiples of their sizes, counted in the
positions of the sequence. A token has its place in a tile by its own position, and all products are
of one shape, so a token's sums are the same whether it came alone or in a chunk.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from qwen3_asgi.model.operators import TorchOperators

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from qwen3_asgi.model.batch import Segment
    from qwen3_asgi.model.kv import LayerKV

QUERY_TILE = 16
# A multiple of QUERY_TILE: the tokens of a tile of queries then need the same tiles of keys.
KEY_TILE = 128


def attend_in_tiles(
    queries: Tensor, keys: Tensor, values: Tensor, kv: LayerKV, segments: Sequence[Segment]
) -> Tensor:
    """`attention.attend` in float32, one tile after another."""
    num_tokens, num_heads, dim = queries.shape
    grouped = queries.view(num_tokens, keys.shape[1], -1, dim).transpose(0, 1).float()
    grouped *= dim**-0.5
    out = torch.empty_like(grouped)
    for segment in segments:
        rows = slice(segment.first, segment.first + segment.length)
        own = (keys[rows], values[rows]) if segment.length > 1 else None
        held = [kv.read(stretch) for stretch in segment.held]
        num_held = sum(stretch.length for stretch in segment.held)
        all_keys, all_values = (
            _in_tiles([pair[i][0] for pair in held] + ([own[i].transpose(0, 1)] if own else []))
            for i in (0, 1)
        )
        # A lone row's own key is in the pool and counted there.
        start = num_held if own else num_held - 1
        _attend_one(grouped[:, rows], all_keys, all_values, start, out[:, rows])
    return out.transpose(0, 1).reshape(num_tokens, num_heads * dim).to(queries.dtype)


def _in_tiles(parts: Sequence[Tensor]) -> Tensor:
    """Join `[kv_heads, S, D]` along S, in float32, with zeros up to a whole tile."""
    whole = torch.cat(list(parts), dim=1).float()
    return functional.pad(whole, (0, 0, 0, -whole.shape[1] % KEY_TILE))


def _attend_one(queries: Tensor, keys: Tensor, values: Tensor, start: int, out: Tensor) -> None:
    """One sequence: queries and `out` are `[kv_heads, T, group, D]`, from position `start` on."""
    kv_heads, length, group, dim = queries.shape
    for first in range(start - start % QUERY_TILE, start + length, QUERY_TILE):
        low, high = max(first, start), min(first + QUERY_TILE, start + length)
        inside, outside = slice(low - first, high - first), slice(low - start, high - start)
        tile = queries.new_zeros(kv_heads, QUERY_TILE, group, dim)
        tile[:, inside] = queries[:, outside]
        found = _attend_tile(tile.view(kv_heads, -1, dim), keys, values, first, group)
        out[:, outside] = found.view(tile.shape)[:, inside]


def _attend_tile(queries: Tensor, keys: Tensor, values: Tensor, first: int, group: int) -> Tensor:
    """Queries `[kv_heads, QUERY_TILE * group, D]` over the keys up to them, with a running softmax
    (Milakov and Gimelshein 2018, arXiv:1805.02867)."""
    own = first + torch.arange(QUERY_TILE).repeat_interleave(group).unsqueeze(1)
    best = queries.new_full((*queries.shape[:2], 1), float("-inf"))
    total, mixed = torch.zeros_like(best), torch.zeros_like(queries)
    for begin in range(0, first + QUERY_TILE, KEY_TILE):
        # Copied, so that strides and alignment are the same for every length of the sequence.
        tile_keys, tile_values = (
            each[:, begin : begin + KEY_TILE].clone(memory_format=torch.contiguous_format)
            for each in (keys, values)
        )
        logits = torch.bmm(queries, tile_keys.transpose(1, 2))
        unseen = begin + torch.arange(KEY_TILE) > own
        logits.masked_fill_(unseen, float("-inf"))
        before, best = best, torch.maximum(best, logits.amax(-1, keepdim=True))
        shrink, weights = torch.exp(before - best), torch.exp(logits - best)
        total = total * shrink + weights.sum(-1, keepdim=True)
        mixed = mixed * shrink + torch.bmm(weights, tile_values)
    return mixed / total


class TiledOperators(TorchOperators):
    """Rows depend on nothing but themselves and, for attention, the keys up to them."""

    _attend = staticmethod(attend_in_tiles)

    def silu_mul(self, fused: Tensor) -> Tensor:
        # torch's own silu has other last bits where a thread's part ends amid a vector; exp and
        # what is rounded correctly have not.
        gate, up = fused.chunk(2, dim=-1)
        wide = gate.float()
        active = wide / (torch.exp(-wide) + 1)
        return active.to(fused.dtype).mul_(up)
