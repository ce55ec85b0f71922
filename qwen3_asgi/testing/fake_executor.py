"""An executor without a model: deterministic tokens, a record of every call, and faults on demand.

It checks what a real one would corrupt silently: that the KV of every position before a row's
start was written to exactly the block the table names, by a row with the same token prefix.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from qwen3_asgi.scheduler.plan import RequestId, Row, SampledToken, StepPlan, StepResult

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True, slots=True)
class RowCall:
    """One recorded row of one step."""

    step: int
    request_id: RequestId
    kind: str
    start: int
    token_ids: tuple[int, ...]
    blocks: tuple[int, ...]


def next_token(prefix: tuple[int, ...], vocab_size: int) -> int:
    """The fake model: a token that depends on the whole prefix, never 0 (reserved for eos)."""
    value = 1469598103934665603
    for token in prefix:
        value = ((value ^ (token + 1)) * 1099511628211) % (1 << 64)
    return 1 + value % (vocab_size - 1)


class FakeExecutor:
    """Implements `ModelExecutor`. Sizes as there; `vocab_size` bounds the tokens it makes.

    Set `before_step` to be called with each plan: it may raise (a failing step), block (a slow
    one), or cancel somebody (in flight). Set `on_drop` to be called inside each `drop_request`.
    `eos_after` maps a request id to the number of output tokens after which it yields token 0.
    """

    def __init__(
        self,
        *,
        num_kv_blocks: int = 64,
        block_size: int = 4,
        max_context_tokens: int = 4096,
        vocab_size: int = 1000,
    ) -> None:
        self.num_kv_blocks = num_kv_blocks
        self.block_size = block_size
        self.max_context_tokens = max_context_tokens
        self.vocab_size = vocab_size
        self.rows: list[RowCall] = []
        self.plans = 0
        self.dropped: list[RequestId] = []
        self.closed = False
        self.before_step: Callable[[StepPlan], None] | None = None
        self.on_drop: Callable[[RequestId], None] | None = None
        self.eos_after: dict[str, int] = {}
        self.row_errors: dict[str, str] = {}
        # slot -> the token prefix whose KV it holds, as a real KV cache would.
        self._slots: dict[int, tuple[int, ...]] = {}

    def step(self, plan: StepPlan) -> StepResult:
        self.plans += 1
        for row in plan.rows:
            self.rows.append(
                RowCall(
                    plan.step,
                    row.request_id,
                    row.kind,
                    row.start,
                    tuple(row.token_ids),
                    tuple(row.block_table),
                )
            )
        if self.before_step is not None:
            self.before_step(plan)
        tokens: dict[RequestId, SampledToken] = {}
        errors: dict[RequestId, str] = {}
        for row in plan.rows:
            prefix = self._forward(row)
            if row.request_id in self.row_errors:
                errors[row.request_id] = self.row_errors[row.request_id]
            elif row.sample is not None:
                tokens[row.request_id] = SampledToken(self._sample(row, prefix))
        return StepResult(tokens, errors)

    def drop_request(self, request_id: RequestId) -> None:
        self.dropped.append(request_id)
        if self.on_drop is not None:
            self.on_drop(request_id)

    def close(self) -> None:
        self.closed = True

    def rows_of(self, request_id: str) -> list[RowCall]:
        return [row for row in self.rows if row.request_id == request_id]

    def _slot(self, row: Row, position: int) -> int:
        size = self.block_size
        return row.block_table[position // size] * size + position % size

    def _forward(self, row: Row) -> tuple[int, ...]:
        prefix: tuple[int, ...] = ()
        if row.start:
            prefix = self._slots[self._slot(row, row.start - 1)]
            if len(prefix) != row.start:
                raise RuntimeError(
                    f"request {row.request_id}: KV at position {row.start - 1} belongs to another "
                    f"sequence"
                )
            for position in range(row.start):
                if self._slots[self._slot(row, position)] != prefix[: position + 1]:
                    raise RuntimeError(
                        f"request {row.request_id}: KV at position {position} was overwritten"
                    )
        for offset, token in enumerate(row.token_ids):
            prefix = (*prefix, token)
            self._slots[self._slot(row, row.start + offset)] = prefix
        return prefix

    def _sample(self, row: Row, prefix: tuple[int, ...]) -> int:
        spec = row.sample
        if spec is None:
            raise RuntimeError("no token is wanted after this row")
        limit = self.eos_after.get(row.request_id)
        if limit is not None and spec.position >= limit and 0 not in spec.banned_token_ids:
            return 0
        return next_token(prefix, self.vocab_size)
