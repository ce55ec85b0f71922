"""Steps of an executor under a stopwatch: what `bench step` runs, and where torch is needed for it.

A decode step's rows all stand at the same position. One sequence is prefilled; the blocks of the
others are copies, each in memory of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from qwen3_asgi.model.executor import TorchExecutor
from qwen3_asgi.model.plain_loop import PlainLoop
from qwen3_asgi.model.probes import Probes, clock, forward_flops, step_bytes
from qwen3_asgi.model.splitting import PARTS, split
from qwen3_asgi.scheduler.plan import RequestId, Row, SampleSpec, Sampling, StepPlan

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from qwen3_asgi.scheduler.executor import ModelExecutor
    from qwen3_asgi.scheduler.plan import RowKind

WARM_UP_STEPS = 2


class Decoding(NamedTuple):
    """Seconds: `plain` of whole steps, `peer` of transformers' (empty without it), taken in turn;
    `parts` of each split step, with its whole under "step"."""

    plain: list[float]
    peer: list[float]
    parts: list[dict[str, float]]


class Bench:
    """The executor under test; `peer_folder` is the checkpoint's, None for dummy weights.

    Raises:
        ValueError: this executor is not torch's.
    """

    def __init__(self, executor: ModelExecutor) -> None:
        if not isinstance(executor, TorchExecutor):
            raise ValueError(f"only torch's executor can be split, not {type(executor).__name__}")
        self._executor = executor
        self._probes = Probes(executor.device, executor.dtype)
        self._peer: PlainLoop | None = None
        self._step = 0

    def add_peer(self, folder: Path | None) -> None:
        """Compare with transformers from now on, on the weights of `folder` or the dummy ones."""
        executor = self._executor
        self._peer = PlainLoop(executor.model_config, folder, executor.dtype, executor.device)

    @property
    def device(self) -> str:
        return str(self._executor.device)

    @property
    def dtype(self) -> str:
        return str(self._executor.dtype).removeprefix("torch.")

    def probe(self) -> tuple[float, float]:
        """Measure once more; the best bytes and operations per second so far."""
        self._probes.run()
        return self._probes.best_bytes_per_second, self._probes.best_flops_per_second

    def decode_needs(self, batch: int, context: int) -> tuple[int, int]:
        """Bytes that a decode step must read, and operations that it must do."""
        config = self._executor.model_config
        flops = forward_flops(config, batch, batch * context, batch)
        return step_bytes(config, self._executor.dtype, batch, context), flops

    def prefill_needs(self, chunk: int) -> tuple[int, int]:
        """The same of a prompt of one chunk."""
        config = self._executor.model_config
        pairs = chunk * (chunk + 1) // 2
        bytes_read = step_bytes(config, self._executor.dtype, 1, chunk)
        return bytes_read, forward_flops(config, chunk, pairs, 1)

    def prefill(self, chunk: int, steps: int) -> tuple[list[float], list[float]]:
        """Seconds of forwarding a prompt of one chunk, ours and transformers', in turn."""
        prompt = _prompt(chunk, self._executor.model_config.vocab_size)
        row = self._row("prefill", 0, prompt, 0, self._blocks(chunk, 0))
        ours, theirs = [], []
        for number in range(-1, steps):
            seconds = self._timed([row])
            if number >= 0:
                ours.append(seconds)
            if self._peer is not None:
                begin = clock(self._executor.device)
                self._peer.prefill(prompt)
                if number >= 0:
                    theirs.append(clock(self._executor.device) - begin)
        return ours, theirs

    def decode(self, batch: int, context: int, steps: int) -> Decoding:
        """Decode steps whose rows each attend to `context` tokens, their own included."""
        executor = self._executor
        self._fill(batch, context)
        rows = [
            self._row("decode", i, [1 + i], context - 1, self._blocks(context, i))
            for i in range(batch)
        ]
        found = Decoding([], [], [])
        peer = self._peer
        cache: Any = peer.cache(batch, context - 1) if peer is not None else None
        for number in range(-WARM_UP_STEPS, steps):
            seconds = self._timed(rows)
            if number >= 0:
                found.plain.append(seconds)
            if peer is not None:
                ids = peer.first(batch)
                begin = clock(executor.device)
                peer.decode(ids, cache)
                if number >= 0:
                    found.peer.append(clock(executor.device) - begin)
                cache.crop(-1)
        with split(executor) as watches:
            for number in range(-1, steps):
                seconds = self._timed(rows)
                parts = watches.take()
                if number >= 0:
                    found.parts.append({"step": seconds, **{name: parts[name] for name in PARTS}})
        return found

    def _timed(self, rows: Sequence[Row]) -> float:
        executor = self._executor
        self._step += 1
        plan = StepPlan(self._step, tuple(rows))
        begin = clock(executor.device)
        result = executor.step(plan)
        seconds = clock(executor.device) - begin
        if result.errors or len(result.tokens) != len(rows):
            raise RuntimeError(f"a step to be timed failed: {result.errors}")
        return seconds

    def _fill(self, batch: int, context: int) -> None:
        """Write the KV of every row's `context - 1` tokens before its own."""
        if context < 2:
            return
        prompt = _prompt(context - 1, self._executor.model_config.vocab_size)
        table = self._blocks(context, 0)
        for start in range(0, len(prompt), 512):
            self._timed([self._row("prefill", 0, prompt[start : start + 512], start, table)])
        copies = [
            pair
            for i in range(1, batch)
            for pair in zip(table, self._blocks(context, i), strict=True)
        ]
        if copies:
            self._executor.copy_blocks(copies)

    def _blocks(self, tokens: int, row: int) -> list[int]:
        """The blocks of a row: next to each other, after those of the rows before it."""
        each = -(-tokens // self._executor.block_size)
        return list(range(row * each, (row + 1) * each))

    def _row(
        self, kind: RowKind, number: int, tokens: list[int], start: int, table: list[int]
    ) -> Row:
        sample = SampleSpec(Sampling(temperature=0.0), 0)
        return Row(RequestId(f"row {number}"), kind, tokens, start, table, sample)


def _prompt(tokens: int, vocab_size: int) -> list[int]:
    """Some tokens, all of them in the tokenizer of any model."""
    return [(7 * i) % min(vocab_size, 256) for i in range(tokens)]
