"""Sampling without a word from the device: the same tokens as `sampler.Sampler`, read later.

Logits become int64 keys that order like (logit, lower id first), so no two are equal and `topk`
leaves nothing open; what remains is `truncation` for all rows at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from qwen3_asgi.model.uniform import uniform
from qwen3_asgi.model.upload import upload

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from qwen3_asgi.scheduler.plan import SampleSpec

# In place of a token. Negative, and so unlike any.
NOT_FINITE = -1
ALL_FORBIDDEN = -2
NO_TOKEN_BEFORE = -3

NEGATIVE_INFINITY = float("-inf")
_LOW_WORD = 2**32 - 1


class Noted(NamedTuple):
    """Of the rows that want log-probabilities, in their order; float32 and int64.

    `log_sums` and `chosen` (the token's logit) are `[L]`, `ids` and `logits` `[L, most wanted]`.
    """

    rows: tuple[int, ...]
    log_sums: Tensor
    chosen: Tensor
    ids: Tensor
    logits: Tensor


class DeviceSamples(NamedTuple):
    """int64 `[R]` tokens, or the codes above; `noted` if any row wants log-probabilities."""

    tokens: Tensor
    noted: Noted | None


@dataclass(frozen=True, slots=True)
class Wishes:
    """What the rows of a step want, uploaded before its logits are there.

    `numbers` is float64 `[5, R]`: temperature (1 for greedy), top_k (0 for none), top_p, min_p, u.
    `greedy` is bool `[R]`; `banned` int64 `[2, n]` (row, id). `width` is how many of the best
    tokens have to be ranked, 0 for none; `any_plain` says whether a row draws from all tokens.
    """

    numbers: Tensor
    greedy: Tensor
    banned: Tensor | None
    width: int
    any_drawn: bool
    any_plain: bool
    noted_rows: tuple[int, ...]
    noted_index: Tensor | None
    alternatives: int

    @classmethod
    def of(cls, specs: Sequence[SampleSpec], vocab_size: int, device: torch.device) -> Wishes:
        width, any_drawn, any_plain = 0, False, False
        columns: list[tuple[float, ...]] = []
        for spec in specs:
            wanted = spec.sampling
            top_k = wanted.top_k if 0 < wanted.top_k < vocab_size else 0
            if wanted.temperature == 0:
                columns.append((1.0, 0.0, 1.0, 0.0, 0.0))
                continue
            any_drawn = True
            if top_k:
                width = max(width, top_k)
            elif wanted.top_p < 1:
                width = vocab_size
            else:
                any_plain = True
            u = uniform(wanted.seed, spec.position)
            columns.append((wanted.temperature, float(top_k), wanted.top_p, wanted.min_p, u))
        banned = [
            (row, token)
            for row, spec in enumerate(specs)
            for token in spec.banned_token_ids
            if 0 <= token < vocab_size
        ]
        noted = tuple(i for i, spec in enumerate(specs) if spec.sampling.logprobs is not None)
        return cls(
            numbers=upload(list(zip(*columns, strict=True)), torch.float64, device),
            greedy=upload([s.sampling.temperature == 0 for s in specs], torch.bool, device),
            banned=(
                upload(list(zip(*banned, strict=True)), torch.int64, device) if banned else None
            ),
            width=width,
            any_drawn=any_drawn,
            any_plain=any_plain,
            noted_rows=noted,
            noted_index=upload(noted, torch.int64, device) if noted else None,
            alternatives=max((specs[i].sampling.logprobs or 0 for i in noted), default=0),
        )


def sample(logits: Tensor, wishes: Wishes, unowned: Tensor) -> DeviceSamples:
    """Sample rows of logits; nothing is read back by the host.

    Args:
        logits: float32 `[R, vocab]`; overwritten.
        wishes: of the R rows.
        unowned: int64 ids that stand for no token.
    """
    low, high = torch.aminmax(logits, dim=1)
    finite = torch.isfinite(low) & torch.isfinite(high)
    # What comes of the other rows is discarded; it must only not spread.
    logits.masked_fill_(~finite.unsqueeze(1), 0.0)
    raw = None if wishes.noted_index is None else logits.index_select(0, wishes.noted_index)
    logits.index_fill_(1, unowned, NEGATIVE_INFINITY)
    if wishes.banned is not None:
        rows, ids = wishes.banned
        never = torch.full((), NEGATIVE_INFINITY, device=logits.device)
        logits.index_put_((rows, ids), never)
    best, tokens = _first_best(logits)
    if wishes.any_drawn:
        tokens = torch.where(wishes.greedy, tokens, _draw(logits, best, wishes))
    noted = None
    if raw is not None and wishes.noted_index is not None:
        noted = _note(raw, logits, tokens, wishes, wishes.noted_index, unowned)
    tokens = tokens.masked_fill(best == NEGATIVE_INFINITY, ALL_FORBIDDEN)
    return DeviceSamples(tokens.masked_fill(~finite, NOT_FINITE), noted)


def _first_best(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The highest logit of each row and the lowest id that has it.

    `argmax` promises the lowest on the CPU only.
    """
    best = logits.amax(dim=1)
    ids = torch.arange(logits.shape[1], device=logits.device)
    first = torch.where(logits == best.unsqueeze(1), ids, logits.shape[1]).amin(dim=1)
    return best, first


def _draw(logits: Tensor, best: Tensor, wishes: Wishes) -> Tensor:
    temperature, top_k, top_p, min_p, u = wishes.numbers.unsqueeze(-1)
    # A row whose every token is forbidden would subtract infinity from itself.
    base = torch.where(best == NEGATIVE_INFINITY, 0.0, best).double().unsqueeze(1)

    def weigh(values: Tensor) -> Tensor:
        # Subtract before dividing: a tiny temperature must not overflow.
        weights = torch.exp((values.double() - base) / temperature)
        return weights.masked_fill(weights < min_p, 0.0)

    # The whole vocabulary in float64 is only for rows that need it.
    everything = None
    if wishes.any_plain or wishes.width == logits.shape[1]:
        everything = weigh(logits)
    drawn = None
    if everything is not None and wishes.any_plain:
        drawn = _pick(everything, u).squeeze(1)
    if wishes.width:
        ids, values = ranked(logits, wishes.width)
        place = torch.arange(wishes.width, device=logits.device)
        weights = weigh(values)
        weights = weights.masked_fill((top_k > 0) & (place >= top_k), 0.0)
        total = weights.sum(dim=1, keepdim=True)
        if everything is not None:
            total = torch.where(top_k > 0, total, everything.sum(dim=1, keepdim=True))
        before = weights.cumsum(dim=1) - weights
        weights = torch.where((top_p >= 1) | (before < top_p * total), weights, 0.0)
        from_ranked = ids.gather(1, _pick(weights, u)).squeeze(1)
        if drawn is None:
            drawn = from_ranked
        else:
            plain = ((top_k == 0) & (top_p >= 1)).squeeze(1)
            drawn = torch.where(plain, drawn, from_ranked)
    if drawn is None:
        raise ValueError("no row of these wishes is drawn")
    return drawn


def _pick(weights: Tensor, u: Tensor) -> Tensor:
    """`truncation._pick` for rows `[R, W]` and `u` `[R, 1]`: int64 `[R, 1]`."""
    cumulative = weights.cumsum(dim=1)
    index = torch.searchsorted(cumulative, u * cumulative[:, -1:], right=True)
    place = torch.arange(weights.shape[1], device=weights.device)
    last = torch.where(weights > 0, place, 0).amax(dim=1, keepdim=True)
    return torch.minimum(index, last)


def ranked(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Ids and logits of each row's `count` best, highest first, equal ones by id."""
    # Adding 0 makes -0 and 0, which are equal logits, the same bits.
    bits = (logits + 0.0).view(torch.int32)
    # Floats order like their bits, negative ones backwards (Herf 2001, "Radix tricks").
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(torch.int64)
    ids = torch.arange(logits.shape[1], device=logits.device)
    keys = (ordered << 32) | (_LOW_WORD - ids)
    if count == logits.shape[1]:
        best = keys.sort(dim=1, descending=True).values
    else:
        best = keys.topk(count, dim=1).values
    found = _LOW_WORD - (best & _LOW_WORD)
    return found, logits.gather(1, found)


def _note(
    raw: Tensor, masked: Tensor, tokens: Tensor, wishes: Wishes, index: Tensor, unowned: Tensor
) -> Noted:
    chosen = masked.index_select(0, index).gather(1, tokens.index_select(0, index).unsqueeze(1))
    log_sums = raw.logsumexp(dim=1)
    raw.index_fill_(1, unowned, NEGATIVE_INFINITY)
    ids, logits = ranked(raw, min(wishes.alternatives, raw.shape[1]))
    return Noted(wishes.noted_rows, log_sums, chosen.squeeze(1), ids, logits)
