"""Attention of a flattened batch over its fresh keys and the KV pool, sequence by sequence.

The query heads of a group become extra query rows against their one KV head, so keys and values
are never repeated. Where a sequence's KV lies in several stretches, each is attended alone and the
parts are merged exactly: with `lse_i` the log-sum-exp of part i's logits, the whole is the mean of
the parts weighted by `softmax(lse)` (Milakov and Gimelshein 2018, arXiv:1805.02867; Dao et al.
2022, arXiv:2205.14135).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from qwen3_asgi.model.batch import Segment
    from qwen3_asgi.model.kv import LayerKV, Stretch


class Part(NamedTuple):
    """Attention over some of the keys: `out` `[B, H, Q, D]`, `lse` float32 `[B, H, Q]`."""

    out: Tensor
    lse: Tensor


def attend(
    queries: Tensor, keys: Tensor, values: Tensor, kv: LayerKV, segments: Sequence[Segment]
) -> Tensor:
    """Causal grouped-query attention. Keys and values of this step are in the pool already.

    Args:
        queries: `[T, heads, D]`, rotated.
        keys: `[T, kv_heads, D]`, rotated; this step's.
        values: `[T, kv_heads, D]`, this step's.
        kv: the layer's pool.
        segments: which rows of the batch belong to which sequence, and where its KV lies.

    Returns:
        `[T, heads * D]` in the dtype of `queries`.
    """
    num_tokens, num_heads, dim = queries.shape
    kv_heads = keys.shape[1]
    grouped = queries.reshape(num_tokens, kv_heads, num_heads // kv_heads, dim)
    out = torch.empty_like(grouped)
    for segment in segments:
        rows = slice(segment.first, segment.first + segment.length)
        if segment.length == 1:
            found = merge(over_stretches(grouped[rows], kv, segment.held))
            out[segment.first] = found[0]
        else:
            found = _prefill(grouped[rows], keys[rows], values[rows], kv, segment.held)
            out[rows] = found.permute(2, 0, 1, 3)
    return out.reshape(num_tokens, num_heads * dim)


def _prefill(
    queries: Tensor, keys: Tensor, values: Tensor, kv: LayerKV, cached: Sequence[Stretch]
) -> Tensor:
    """Chunk of one sequence: causal over itself, unmasked over the positions before it.

    `queries` is `[T, kv_heads, group, D]`; returns `[kv_heads, group, T, D]`.
    """
    length, kv_heads, group, dim = queries.shape
    by_head = queries.permute(1, 2, 0, 3)
    # KV heads stand where a batch would, so that a group shares its keys by a stride of zero.
    own_keys = keys.transpose(0, 1).unsqueeze(1).expand(-1, group, -1, -1)
    own_values = values.transpose(0, 1).unsqueeze(1).expand(-1, group, -1, -1)
    own = partial_attention(by_head, own_keys, own_values, causal=True)
    if not cached:
        return own.out
    rows = by_head.reshape(1, kv_heads, group * length, dim)
    parts = [
        Part(part.out.reshape(by_head.shape), part.lse.reshape(by_head.shape[:-1]))
        for part in over_stretches(rows, kv, cached)
    ]
    return merge([own, *parts])


def over_stretches(queries: Tensor, kv: LayerKV, stretches: Sequence[Stretch]) -> list[Part]:
    """Unmasked attention of `queries` `[1, kv_heads, Q, D]` over each stretch."""
    return [partial_attention(queries, *kv.read(held), causal=False) for held in stretches]


def merge(parts: Sequence[Part]) -> Tensor:
    """Join parts over disjoint keys into the attention over all of them."""
    if len(parts) == 1:
        return parts[0].out
    weights = torch.softmax(torch.stack([part.lse for part in parts]), dim=0).unsqueeze(-1)
    out = torch.stack([part.out for part in parts])
    return (out * weights).sum(dim=0).to(out.dtype)


def partial_attention(queries: Tensor, keys: Tensor, values: Tensor, *, causal: bool) -> Part:
    """Attention of `[B, H, Q, D]` over `[B, H, S, D]`, with the log-sum-exp of its logits."""
    if queries.device.type == "cpu":
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            queries, keys, values, is_causal=causal
        )
        return Part(out, lse)
    return reference_attention(queries, keys, values, causal=causal)


def reference_attention(queries: Tensor, keys: Tensor, values: Tensor, *, causal: bool) -> Part:
    """The same in plain operations, for devices without a kernel of ours and for tests."""
    scale = queries.shape[-1] ** -0.5
    logits = (queries.float() * scale) @ keys.float().transpose(-1, -2)
    if causal:
        allowed = torch.ones(logits.shape[-2:], dtype=torch.bool, device=logits.device).tril()
        logits = logits.masked_fill(~allowed, float("-inf"))
    lse = torch.logsumexp(logits, dim=-1)
    weights = torch.exp(logits - lse.unsqueeze(-1))
    return Part((weights @ values.float()).to(queries.dtype), lse)
