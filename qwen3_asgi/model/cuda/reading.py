"""Samples on their way to the host: begun on the device, waited for by whoever needs the tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from qwen3_asgi.model.cuda.sampling import (
    ALL_FORBIDDEN,
    NO_TOKEN_BEFORE,
    NOT_FINITE,
    DeviceSamples,
    Noted,
)
from qwen3_asgi.scheduler.plan import SampledToken, StepResult

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from qwen3_asgi.scheduler.plan import RequestId, RunningStep

MESSAGES = {
    NOT_FINITE: "the model produced NaN or infinite logits",
    ALL_FORBIDDEN: "every token is banned or unowned",
    NO_TOKEN_BEFORE: "the step before gave it no token",
}


class ReadingStep:
    """A `RunningStep` whose samples are being copied to pinned memory.

    Args:
        request_ids: of the sampled rows.
        wanted: how many alternatives each wants, None without log-probabilities.
        samples: on the device; at least one row per request, further ones are ignored.
    """

    def __init__(
        self,
        request_ids: Sequence[RequestId],
        wanted: Sequence[int | None],
        samples: DeviceSamples,
    ) -> None:
        self._request_ids = tuple(request_ids)
        self._wanted = tuple(wanted)
        noted = samples.noted
        self._tokens = _fetch(samples.tokens)
        self._noted = noted and Noted(noted.rows, *(_fetch(tensor) for tensor in noted[1:]))
        self._done = None
        if samples.tokens.is_cuda:
            self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._done.record()

    def result(self) -> StepResult:
        """Wait for the copies and unpack them."""
        if self._done is not None:
            self._done.synchronize()
        tokens: dict[RequestId, SampledToken] = {}
        errors: dict[RequestId, str] = {}
        found = self._tokens.tolist()
        notes = {} if self._noted is None else dict(_notes(self._noted))
        for row, (request_id, count) in enumerate(
            zip(self._request_ids, self._wanted, strict=True)
        ):
            token = found[row]
            if token < 0:
                errors[request_id] = MESSAGES[token]
            elif count is None:
                tokens[request_id] = SampledToken(token)
            else:
                logprob, alternatives = notes[row]
                tokens[request_id] = SampledToken(token, logprob, alternatives[:count])
        return StepResult(tokens, errors)


def _notes(noted: Noted) -> list[tuple[int, tuple[float, tuple[tuple[int, float], ...]]]]:
    columns = (noted.log_sums, noted.chosen, noted.ids, noted.logits)
    found = []
    for row, log_sum, chosen, ids, logits in zip(
        noted.rows, *(column.tolist() for column in columns), strict=True
    ):
        alternatives = tuple(
            (token, logit - log_sum)
            for token, logit in zip(ids, logits, strict=True)
            # Not in the vocabulary of the tokenizer: ranked only when all others are.
            if logit > float("-inf")
        )
        found.append((row, (chosen - log_sum, alternatives)))
    return found


def _fetch(tensor: Tensor) -> Tensor:
    if not tensor.is_cuda:
        return tensor.clone()
    target = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return target.copy_(tensor, non_blocking=True)


if TYPE_CHECKING:
    _conforms: type[RunningStep] = ReadingStep
