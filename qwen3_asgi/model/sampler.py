"""Logits of a batch in, one token per row out. A row's token depends on that row alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from qwen3_asgi.model.cpu.greedy import NOT_FINITE, cpu_greedy
from qwen3_asgi.model.sums import log_sum_exp
from qwen3_asgi.model.truncation import Ranked, draw, rank
from qwen3_asgi.model.uniform import uniform
from qwen3_asgi.scheduler.plan import SampledToken

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from torch import Tensor

    from qwen3_asgi.scheduler.plan import SampleSpec

# Rows with a top_k up to this share one `topk` over the batch.
SHARED_TOP_K = 256
NEGATIVE_INFINITY = float("-inf")


class RowError(NamedTuple):
    """Why a row has no token."""

    message: str


_NOT_FINITE = RowError("the model produced NaN or infinite logits")
_NO_TOKEN = RowError("every token is banned or unowned")


class Sampler:
    """Samples rows of logits.

    Args:
        vocab_size: width of the logits.
        owned_token_ids: the ids that stand for a token; an int n means `0 … n-1`. Qwen3's
            embedding has more rows than its tokenizer has tokens, and those are never chosen.
        device: where the logits are.
    """

    def __init__(
        self, vocab_size: int, owned_token_ids: int | Collection[int], device: torch.device
    ) -> None:
        owned = range(owned_token_ids) if isinstance(owned_token_ids, int) else owned_token_ids
        ids = torch.tensor([i for i in owned if 0 <= i < vocab_size], dtype=torch.int64)
        self._greedy = cpu_greedy(vocab_size, ids.tolist(), device)
        unowned = torch.ones(vocab_size, dtype=torch.bool)
        unowned[ids] = False
        self._unowned = unowned.nonzero().flatten().to(device)

    @property
    def unowned(self) -> Tensor:
        """Ids that are never chosen, int64."""
        return self._unowned

    def sample(self, logits: Tensor, specs: Sequence[SampleSpec]) -> list[SampledToken | RowError]:
        """Return one entry per row.

        Args:
            logits: `[R, vocab]` in the model's dtype; may be overwritten.
            specs: what row i wants.
        """
        if self._greedy is not None and all(map(_is_plain_greedy, specs)):
            return [_greedy_result(token) for token in self._greedy(logits)]
        logits = logits.float()
        low, high = torch.aminmax(logits, dim=1)
        # One pass: NaN spreads into minimum and maximum, infinity is one of them.
        finite = (torch.isfinite(low) & torch.isfinite(high)).tolist()
        notes = [
            _Note.of(row, spec, self._unowned) if ok else None
            for row, spec, ok in zip(logits, specs, finite, strict=True)
        ]
        if not all(finite):
            # Whatever comes of these rows is discarded; it must only not fail.
            logits[[not ok for ok in finite]] = 0.0
        logits.index_fill_(1, self._unowned, NEGATIVE_INFINITY)
        for row, spec in zip(logits, specs, strict=True):
            if banned := [i for i in spec.banned_token_ids if 0 <= i < len(row)]:
                row[banned] = NEGATIVE_INFINITY
        chosen = _choose(logits, specs)
        return [
            _result(row, token, note)
            for row, token, note in zip(logits, chosen, notes, strict=True)
        ]


def _is_plain_greedy(spec: SampleSpec) -> bool:
    sampling = spec.sampling
    return sampling.temperature == 0 and sampling.logprobs is None and not spec.banned_token_ids


def _greedy_result(token: int) -> SampledToken | RowError:
    if token >= 0:
        return SampledToken(token)
    return _NOT_FINITE if token == NOT_FINITE else _NO_TOKEN


class _Note(NamedTuple):
    """What is read from a row's raw logits before anything is masked. Both None: no logprobs."""

    log_sum: float | None = None
    alternatives: tuple[tuple[int, float], ...] = ()

    @classmethod
    def of(cls, row: Tensor, spec: SampleSpec, unowned: Tensor) -> _Note:
        count = spec.sampling.logprobs
        if count is None:
            return cls()
        log_sum = float(log_sum_exp(row))
        if count == 0:
            return cls(log_sum)
        best = rank(row.index_fill(0, unowned, NEGATIVE_INFINITY), count)
        pairs = zip(best.ids.tolist(), best.logits.tolist(), strict=True)
        return cls(log_sum, tuple((token, logit - log_sum) for token, logit in pairs))


def _choose(logits: Tensor, specs: Sequence[SampleSpec]) -> list[int | None]:
    """Token id per row; None where every token is forbidden."""
    chosen: list[int | None] = [None] * len(specs)
    greedy = [i for i, spec in enumerate(specs) if spec.sampling.temperature == 0]
    if greedy:
        rows = logits if len(greedy) == len(specs) else logits[greedy]
        # argmax returns the first of equal maxima, which is the lowest id.
        tokens = rows.argmax(dim=1, keepdim=True)
        possible = (rows.gather(1, tokens) > NEGATIVE_INFINITY).flatten().tolist()
        for i, token, found in zip(greedy, tokens.flatten().tolist(), possible, strict=True):
            chosen[i] = token if found else None
    heads = _shared_heads(logits, specs)
    for i, spec in enumerate(specs):
        if spec.sampling.temperature != 0:
            u = uniform(spec.sampling.seed, spec.position)
            chosen[i] = draw(logits[i], spec.sampling, u, heads.get(i))
    return chosen


def _shared_heads(logits: Tensor, specs: Sequence[SampleSpec]) -> dict[int, Ranked]:
    limit = min(SHARED_TOP_K, logits.shape[1] - 1)
    rows = [
        i
        for i, spec in enumerate(specs)
        if spec.sampling.temperature != 0 and 0 < spec.sampling.top_k <= limit
    ]
    if not rows:
        return {}
    widest = max(specs[i].sampling.top_k for i in rows)
    found = (logits if len(rows) == len(specs) else logits[rows]).topk(widest + 1, dim=1)
    return {
        row: Ranked(ids, values)
        for row, ids, values in zip(rows, found.indices, found.values, strict=True)
    }


def _result(row: Tensor, token: int | None, note: _Note | None) -> SampledToken | RowError:
    if note is None:
        return _NOT_FINITE
    if token is None:
        return _NO_TOKEN
    if note.log_sum is None:
        return SampledToken(token)
    return SampledToken(token, float(row[token]) - note.log_sum, note.alternatives)
