"""Temperature and the filters min_p, top_k, top_p over one row of logits, and the draw from it.

Weights are `exp((logit - best) / temperature)`, in float64: the best token weighs 1, so min_p is a
bound on the weight itself, and the filters keep a prefix of the tokens sorted by weight. Each
filter sees what the ones before it left, renormalised.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from qwen3_asgi.model.sums import total_of

if TYPE_CHECKING:
    from torch import Tensor

    from qwen3_asgi.scheduler.plan import Sampling

# top_p alone first looks at this many tokens; nearly always they hold enough of the mass, and the
# whole vocabulary (a hundred times slower to sort) need not be sorted.
NUCLEUS_GUESS = 1024


class Ranked(NamedTuple):
    """Tokens by logit, highest first, equal ones by id; int64 ids and float32 logits."""

    ids: Tensor
    logits: Tensor


def draw(row: Tensor, sampling: Sampling, u: float, head: Ranked | None = None) -> int | None:
    """Draw a token id from float32 logits `[vocab]`, in which -inf marks forbidden tokens.

    Args:
        row: the logits.
        sampling: its temperature must be above 0.
        u: uniform in [0, 1); the token is the one where the cumulative weight passes `u`.
        head: the best `n > top_k` tokens in any order of equals, if the caller has them.

    Returns:
        None when every token is forbidden.
    """
    vocab_size = len(row)
    best = row.max()
    if best == float("-inf"):
        return None
    if 0 < sampling.top_k < vocab_size:
        ranked = rank(row, sampling.top_k, head)
        weights = _weights(ranked.logits, best, sampling)
        return _pick_ranked(ranked, weights, total_of(weights), sampling.top_p, u)
    weights = _weights(row, best, sampling)
    if sampling.top_p >= 1:
        return _pick(weights, u)
    total = total_of(weights)
    ranked = rank(row, min(NUCLEUS_GUESS, vocab_size))
    kept = _weights(ranked.logits, best, sampling)
    if total_of(kept) < sampling.top_p * total:
        ranked = rank(row, vocab_size)
        kept = _weights(ranked.logits, best, sampling)
    return _pick_ranked(ranked, kept, total, sampling.top_p, u)


def rank(row: Tensor, count: int, head: Ranked | None = None) -> Ranked:
    """Return the `count` best tokens of a row, without those at -inf.

    `topk` leaves open which of several equal logits it takes, so a tie at the border is resolved
    here by id: else a token could depend on the batch.
    """
    if count >= len(row):
        logits, ids = row.sort(descending=True, stable=True)
        ranked = Ranked(ids, logits)
    else:
        if head is None:
            found = row.topk(count + 1)
            head = Ranked(found.indices, found.values)
        last, following = head.logits[count - 1], head.logits[count]
        if last == following:
            ids = (row >= last).nonzero().flatten()
        else:
            ids = head.ids[:count].sort().values
        logits, order = row[ids].sort(descending=True, stable=True)
        ranked = Ranked(ids[order][:count], logits[:count])
    possible = ranked.logits > float("-inf")
    return Ranked(ranked.ids[possible], ranked.logits[possible])


def _weights(logits: Tensor, best: Tensor, sampling: Sampling) -> Tensor:
    """Float64 weights relative to the best token; 0 where min_p drops one."""
    # Subtract before dividing: a tiny temperature must not overflow.
    weights = torch.exp((logits.double() - best) / sampling.temperature)
    if sampling.min_p > 0:
        weights[weights < sampling.min_p] = 0
    return weights


def _pick_ranked(ranked: Ranked, weights: Tensor, total: Tensor, top_p: float, u: float) -> int:
    """Keep each token whose predecessors hold less than `top_p` of `total`; pick among these."""
    if top_p < 1:
        before = weights.cumsum(0) - weights
        weights = torch.where(before < top_p * total, weights, 0)
    return int(ranked.ids[_pick(weights, u)])


def _pick(weights: Tensor, u: float) -> int:
    """Inverse of the cumulative distribution: the first index whose running sum exceeds u."""
    cumulative = weights.cumsum(0)
    index = int(torch.searchsorted(cumulative, u * cumulative[-1], right=True))
    if index < len(weights):
        return index
    # Rounding may put u times the sum on the sum itself: then it is the last possible token.
    return int(weights.nonzero()[-1])
