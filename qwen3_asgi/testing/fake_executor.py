"""An executor without a model: deterministic tokens, a record of every call, and faults on demand.

It checks what a real one would corrupt silently: that the KV of every position before a row's
start was written to exactly the block the table names, by a row with the same token prefix.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING

from qwen3_asgi.scheduler.pending import PendingTokens
from qwen3_asgi.scheduler.plan import (
    RequestId,
    Row,
    RunningStep,
    SampledToken,
    StepPlan,
    StepResult,
)

if TYPE_CHECKING:
    from qwen3_asgi.scheduler.executor import KVTiers
    from qwen3_asgi.scheduler.plan import SampleSpec
    from qwen3_asgi.testing.fake_tiers import FakeTiers
    from qwen3_asgi.testing.gate import StepGate

# From a prompt's token ids to those of the output; None for nonsense.
Reply = Callable[[Sequence[int]], Sequence[int] | None]

_SEED = 1469598103934665603


@dataclass(frozen=True, slots=True)
class RowCall:
    """One recorded row of one step."""

    step: int
    request_id: RequestId
    kind: str
    start: int
    token_ids: tuple[int, ...]
    blocks: tuple[int, ...]


class _Prefix:
    """What one KV slot holds: the last token of a sequence, and the sequence before it.

    Interned by its executor, so that two slots hold the same KV exactly if they hold one object.
    """

    __slots__ = ("after", "before", "length", "token", "value")

    def __init__(self, before: _Prefix | None, token: int, adapter: int = 0) -> None:
        self.before = before
        self.length: int = 1 if before is None else before.length + 1
        self.value: int = _fold(_SEED + adapter if before is None else before.value, token)
        self.token = token
        self.after: dict[int, _Prefix] = {}

    def token_ids(self) -> list[int]:
        """The whole sequence."""
        ids: list[int] = []
        at: _Prefix | None = self
        while at is not None:
            ids.append(at.token)
            at = at.before
        return ids[::-1]


def next_token(prefix: Sequence[int], vocab_size: int) -> int:
    """The fake model: a token that depends on the whole prefix, never 0 (reserved for eos)."""
    return 1 + reduce(_fold, prefix, _SEED) % (vocab_size - 1)


def generate(
    prompt: Sequence[int], count: int, vocab_size: int = 1000, adapter: int = 0
) -> list[int]:
    """The `count` tokens that the fake model says after `prompt`, whatever else it runs."""
    value = reduce(_fold, prompt, _SEED + adapter)
    tokens: list[int] = []
    for _ in range(count):
        tokens.append(1 + value % (vocab_size - 1))
        value = _fold(value, tokens[-1])
    return tokens


def _fold(value: int, token: int) -> int:
    return ((value ^ (token + 1)) * 1099511628211) % (1 << 64)


class _LateStep:
    """A step that runs when it is waited for."""

    def __init__(self, executor: FakeExecutor, plan: StepPlan) -> None:
        self._executor = executor
        self._plan = plan

    def result(self) -> StepResult:
        return self._executor.run(self._plan)


class FakeExecutor:
    """Implements `ModelExecutor`. Sizes as there; `vocab_size` bounds the tokens it makes.

    Set `before_step` to be called with each plan: it may raise (a failing step), block (a slow
    one), or cancel somebody (in flight). Set `on_drop` to be called inside each `drop_request`.
    `eos_after` maps a request id to the number of output tokens after which it yields `eos`.
    `row_errors` maps one to the message with which its next row fails. `gate` holds steps. With
    `late`, steps are still running when they are returned.

    `reply` decides what it says before `eos` ends it: it is asked once for each request, and what
    it raises ends the request. Without it, or if it returns None, tokens are deterministic nonsense
    without an end.
    """

    def __init__(
        self,
        *,
        num_kv_blocks: int = 64,
        block_size: int = 4,
        max_context_tokens: int = 4096,
        vocab_size: int = 1000,
        gate: StepGate | None = None,
        reply: Reply | None = None,
        eos: int = 0,
        tiers: FakeTiers | None = None,
        late: bool = False,
    ) -> None:
        self.gate = gate
        self.late = late
        self.reply = reply
        self.eos = eos
        self._tiers = tiers
        if tiers is not None:
            tiers.read, tiers.write = self._read_block, self._write_block
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
        self.adapters: dict[str, int] = {}
        self.copied_blocks: list[tuple[int, int]] = []
        self._replies: dict[RequestId, Sequence[int] | None] = {}
        # With overlap there are two steps at a time.
        self._lock = threading.Lock()
        # slot -> the token prefix whose KV it holds, as a real KV cache would.
        self._slots: dict[int, _Prefix] = {}
        # The first tokens of all sequences, by the adapter (0: none) that they run with.
        self._first: dict[tuple[int, int], _Prefix] = {}
        # What a failed step leaves behind: no sequence at all.
        self._garbage = _Prefix(None, -1)
        self._pending = PendingTokens()

    def step(self, plan: StepPlan) -> StepResult | RunningStep:
        return _LateStep(self, plan) if self.late else self.run(plan)

    def run(self, plan: StepPlan) -> StepResult:
        """The whole step, now."""
        with self._lock:
            self.plans += 1
            if self._tiers is not None:
                self._tiers.before_step()
            rows, missing = self._pending.settle(plan)
            for row in rows:
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
        try:
            if self.gate is not None:
                self.gate.enter(plan)
            if self.before_step is not None:
                self.before_step(plan)
        except Exception:
            with self._lock:
                for row in rows:
                    self._spoil(row)
            raise
        with self._lock:
            result = self._run(rows, missing)
            if any(row.kind == "decode" for row in rows):
                self._pending.note(plan, result)
            return result

    def _run(self, rows: Sequence[Row], missing: Mapping[RequestId, str]) -> StepResult:
        tokens: dict[RequestId, SampledToken] = {}
        errors = dict(missing)
        for row in rows:
            prefix = self._forward(row)
            if row.request_id in self.row_errors:
                self._spoil(row)
                errors[row.request_id] = self.row_errors[row.request_id]
            elif row.sample is not None:
                try:
                    tokens[row.request_id] = SampledToken(self._sample(row, row.sample, prefix))
                except Exception as error:  # of `reply`
                    errors[row.request_id] = f"{type(error).__name__}: {error}"
        return StepResult(tokens, errors)

    @property
    def tiers(self) -> KVTiers | None:
        return self._tiers

    def on_landed(self, wake: Callable[[], None]) -> None:
        if self._tiers is not None:
            self._tiers.wake = wake

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        if self._tiers is not None:
            self._tiers.before_step()
        self.copied_blocks += pairs
        for source, target in pairs:
            self._write_block(target, self._read_block(source))

    def load_adapter(self, name: str, adapter: object) -> None:
        """`adapter` is a number: the tokens that it makes depend on it."""
        if not isinstance(adapter, int):
            raise TypeError(f"the fake adapter {name!r} must be a number, got {adapter!r}")
        self.adapters[name] = adapter

    def unload_adapter(self, name: str) -> None:
        del self.adapters[name]

    def drop_request(self, request_id: RequestId) -> None:
        self.dropped.append(request_id)
        self._replies.pop(request_id, None)
        if self.on_drop is not None:
            self.on_drop(request_id)

    def close(self) -> None:
        self.closed = True

    def rows_of(self, request_id: str) -> list[RowCall]:
        return [row for row in self.rows if row.request_id == request_id]

    def _slot(self, row: Row, position: int) -> int:
        size = self.block_size
        return row.block_table[position // size] * size + position % size

    def _forward(self, row: Row) -> _Prefix:
        prefix = self._verified_prefix(row)
        adapter = self._adapter(row)
        for offset, token in enumerate(row.token_ids):
            if prefix is None:
                prefix = self._first.get((adapter, token))
                if prefix is None:
                    prefix = self._first[adapter, token] = _Prefix(None, token, adapter)
            else:
                if token not in prefix.after:
                    prefix.after[token] = _Prefix(prefix, token)
                prefix = prefix.after[token]
            self._slots[self._slot(row, row.start + offset)] = prefix
        if prefix is None or not row.token_ids:
            raise RuntimeError(f"request {row.request_id}: a row without tokens")
        return prefix

    def _verified_prefix(self, row: Row) -> _Prefix | None:
        """What stands before the row, after checking that every position of it is in place."""
        if row.start == 0:
            return None
        last = expected = self._slots[self._slot(row, row.start - 1)]
        if last.length != row.start or last is self._garbage:
            raise RuntimeError(
                f"request {row.request_id}: KV at position {row.start - 1} belongs to another "
                f"sequence"
            )
        for position in range(row.start - 2, -1, -1):
            if (
                expected.before is None
                or expected.before is not self._slots[self._slot(row, position)]
            ):
                raise RuntimeError(
                    f"request {row.request_id}: KV at position {position} was overwritten"
                )
            expected = expected.before
        if self._first.get((self._adapter(row), expected.token)) is not expected:
            raise RuntimeError(f"request {row.request_id}: the KV is of another adapter")
        return last

    def _spoil(self, row: Row) -> None:
        """Leave garbage where the row would have written, as a step that fails half-way does."""
        for offset in range(len(row.token_ids)):
            self._slots[self._slot(row, row.start + offset)] = self._garbage

    def _adapter(self, row: Row) -> int:
        return 0 if row.adapter is None else self.adapters[row.adapter]

    def _read_block(self, block: int) -> list[_Prefix | None]:
        size = self.block_size
        return [self._slots.get(block * size + offset) for offset in range(size)]

    def _write_block(self, block: int, held: object) -> None:
        if isinstance(held, list):
            for offset, prefix in enumerate(held):
                self._slots[block * self.block_size + offset] = prefix or self._garbage

    def _sample(self, row: Row, spec: SampleSpec, prefix: _Prefix) -> int:
        limit = self.eos_after.get(row.request_id)
        said = self._said(row, spec, prefix)
        if said is not None:
            limit = len(said) if limit is None else min(limit, len(said))
            if spec.position < limit:
                return said[spec.position]
        if limit is not None and spec.position >= limit and self.eos not in spec.banned_token_ids:
            return self.eos
        token = 1 + prefix.value % (self.vocab_size - 1)
        return 0 if token == self.eos else token

    def _said(self, row: Row, spec: SampleSpec, prefix: _Prefix) -> Sequence[int] | None:
        if self.reply is None:
            return None
        if row.request_id not in self._replies:
            prompt = prefix.token_ids()[: prefix.length - spec.position]
            self._replies[row.request_id] = self.reply(prompt)
        return self._replies[row.request_id]
