"""The values that pass between the scheduler and an executor: a `StepPlan` in, a `StepResult` out.

A step is one forward pass over a flattened batch: some rows decode one token, some prefill a chunk
of a prompt. A row says which tokens to forward, where they stand in the sequence, and which KV
blocks hold the sequence; the executor knows nothing else about a request.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple, NewType, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping

RequestId = NewType("RequestId", str)
BlockId = NewType("BlockId", int)
RowKind = Literal["prefill", "decode"]

# In place of a decode row's token: what the step `StepPlan.behind` samples for this request.
PENDING = -1


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling of one request with every default filled in.

    `temperature == 0` is greedy. `top_k <= 0` means no limit. `seed` is always set: the token at
    output position `p` depends on (logits, this value, `p`) alone, never on the rest of the batch.
    `logprobs` is None (none wanted) or the number of alternatives to return (0: the chosen only).
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    logprobs: int | None = None


@dataclass(slots=True, eq=False)
class SampleSpec:
    """Sample one token from the logits after the row's last token.

    `position` counts the tokens this request has generated so far (the random counter);
    `banned_token_ids` must not be chosen (stop tokens before `min_tokens`).
    """

    sampling: Sampling
    position: int
    banned_token_ids: tuple[int, ...] = ()


@dataclass(slots=True, eq=False)
class Row:
    """One request's part of a step.

    `token_ids` (length T >= 1) stand at positions `start … start+T-1`; the KV of positions
    `0 … start-1` is already in the blocks. Position p lives in slot
    `block_table[p // block_size] * block_size + p % block_size`; `block_table` covers at least
    `start + T` positions. `sample` is None for a prefill chunk that is not the prompt's last.
    `adapter` is the LoRA adapter's name, None for the base model.

    With pipelined decode the token of a decode row may be `PENDING`, see `pending.PendingTokens`.
    `dropped` is set, at any time, when the request has gone: skip the row if it has not begun.

    Valid until the step has landed: the scheduler then writes the request's next row into it.
    """

    request_id: RequestId
    kind: RowKind
    token_ids: list[int]
    start: int
    block_table: list[int]
    sample: SampleSpec | None
    adapter: str | None = None
    dropped: bool = False


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: decode rows first, then prefill chunks. Each request has at most one row.

    `behind` is the step that runs while this one is launched, if it waits for tokens of that one.
    """

    step: int
    rows: tuple[Row, ...]
    behind: int | None = None

    @property
    def num_tokens(self) -> int:
        return sum(len(row.token_ids) for row in self.rows)

    @property
    def num_prefill_tokens(self) -> int:
        return sum(len(row.token_ids) for row in self.rows if row.kind == "prefill")

    @property
    def kind(self) -> Literal["prefill", "decode", "mixed"]:
        first, last = self.rows[0].kind, self.rows[-1].kind
        return first if first == last else "mixed"


class SampledToken(NamedTuple):
    """A token and, if wanted, its log-probability and the best alternatives, from raw logits."""

    token_id: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class StepResult:
    """`tokens` has one entry per row with a `SampleSpec`, unless `errors` has one for that row.

    A row named in `errors` (say, NaN logits) ends with that message; the others are unharmed.
    Rows that were `dropped` have neither.
    """

    tokens: Mapping[RequestId, SampledToken]
    errors: Mapping[RequestId, str] = field(default_factory=dict)


class RunningStep(Protocol):
    """A step that the device has begun; the next one can be begun before its tokens are read."""

    def result(self) -> StepResult:
        """Wait for it. Called once, on any thread.

        Raises:
            Exception: as `ModelExecutor.step` does.
        """
        ...


def result_of(step: StepResult | RunningStep) -> StepResult:
    """Wait for what `ModelExecutor.step` has returned, if it is still running.

    Raises:
        TypeError: it is neither, or comes to something else.
        Exception: the step failed.
    """
    result = step
    if not isinstance(step, StepResult) and hasattr(step, "result"):
        result = step.result()
    if not isinstance(result, StepResult):
        raise TypeError(f"the executor returned {type(result).__name__}, no StepResult")
    return result
