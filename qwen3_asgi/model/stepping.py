"""Steps of an executor under a stopwatch: what `bench step` runs, and where torch is needed for it.

A decode step's rows all stand at the same position. One sequence is prefilled; the blocks of the
others are copies, each in memory of its own.
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from qwen3_asgi.model.executor import TorchExecutor
from qwen3_asgi.model.footprint import value_bytes
from qwen3_asgi.model.plain_loop import LoopPeer, PlainLoop
from qwen3_asgi.model.probes import Probes, clock, forward_flops, step_bytes
from qwen3_asgi.model.splitting import PARTS, split
from qwen3_asgi.scheduler.plan import RequestId, Row, SampleSpec, Sampling, StepPlan, result_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from qwen3_asgi.scheduler.executor import ModelExecutor
    from qwen3_asgi.scheduler.plan import RowKind

WARM_UP_STEPS = 2
# Threads that have nothing to do wait in a busy loop for some time, llama.cpp's for tenths of a
# second, on the cores that the next one to be measured needs.
SETTLE_SECONDS = 0.5
MADE_UP_VALUES = 2**22


class StepPeer(Protocol):
    """What is measured beside the executor. Times are in seconds."""

    @property
    def name(self) -> str: ...

    def prepare(self, batch: int, context: int) -> None:
        """The next `decode` is over `batch` sequences of `context` tokens, the new ones included;
        later ones may be some tokens longer."""
        ...

    def decode(self) -> float: ...

    def prefill(self, prompt: list[int]) -> float: ...

    def close(self) -> None: ...


class Timing(NamedTuple):
    """Seconds: `plain` of whole steps, `peers` of each peer's, taken in turn. `limits` are bytes
    read and operations per second, measured right after each step. `parts` are of split decode
    steps, with the whole under "step"."""

    plain: list[float]
    limits: list[tuple[float, float]]
    peers: dict[str, list[float]]
    parts: list[dict[str, float]]


class Bench:
    """The executor under test, and its peers.

    Raises:
        ValueError: this executor is not torch's.
    """

    def __init__(self, executor: ModelExecutor) -> None:
        if not isinstance(executor, TorchExecutor):
            raise ValueError(f"only torch's executor can be split, not {type(executor).__name__}")
        self._executor = executor
        self._probes = Probes(executor.device, executor.dtype)
        self._peers: list[StepPeer] = []
        self._step = 0

    def add_peer(self, peer: StepPeer) -> None:
        """Compare with `peer`, too, from now on, and close it at the end."""
        self._peers.append(peer)

    def add_transformers(self, folder: Path | None) -> None:
        """Compare with transformers, on the weights of `folder` or the dummy ones."""
        executor = self._executor
        loop = PlainLoop(executor.model_config, folder, executor.dtype, executor.device)
        self.add_peer(LoopPeer(loop))

    def add_own(self, name: str, executor: ModelExecutor) -> None:
        """Compare with another executor of ours, which is closed at the end."""
        self.add_peer(_Own(name, Bench(executor)))

    def close(self) -> None:
        """Close the executor and all peers."""
        self._executor.close()
        for peer in self._peers:
            peer.close()

    @property
    def device(self) -> str:
        return str(self._executor.device)

    @property
    def dtype(self) -> str:
        return str(self._executor.dtype).removeprefix("torch.")

    @property
    def threads(self) -> int:
        return torch.get_num_threads()

    def probe(self) -> tuple[float, float]:
        """Measure once more; the best bytes and operations per second so far."""
        self._probes.run()
        return self._probes.best_bytes_per_second, self._probes.best_flops_per_second

    def decode_needs(self, batch: int, context: int) -> tuple[int, int]:
        """Bytes that a decode step must read, and operations that it must do."""
        config = self._executor.model_config
        flops = forward_flops(config, batch, batch * context, batch)
        return self._bytes(batch, context), flops

    def prefill_needs(self, chunk: int) -> tuple[int, int]:
        """The same of a prompt of one chunk."""
        config = self._executor.model_config
        pairs = chunk * (chunk + 1) // 2
        return self._bytes(1, chunk), forward_flops(config, chunk, pairs, 1)

    def _bytes(self, batch: int, context: int) -> int:
        executor = self._executor
        model, _ = executor._open()
        kv = executor.dtype.itemsize
        weight = value_bytes(model._weights.lm_head, kv)
        return step_bytes(executor.model_config, weight, kv, batch, context)

    def prefill(self, chunk: int, steps: int) -> Timing:
        """Forwarding a prompt of one chunk, ours and each peer's, in turn."""
        prompt = _prompt(chunk, self._executor.model_config.vocab_size)
        peers = {peer.name: partial(peer.prefill, prompt) for peer in self._peers}
        return self._in_turn(partial(self.timed_prompt, prompt), peers, 1, steps)

    def decode(self, batch: int, context: int, steps: int) -> Timing:
        """Decode steps whose rows each attend to `context` tokens, their own included."""
        rows = self.prepared(batch, context)
        for peer in self._peers:
            peer.prepare(batch, context)
        # Each step is one of many: beside peers the second after a pause, for the first one wakes
        # threads.
        times = 2 if self._peers else 1
        peers = {peer.name: partial(_last_of, times, peer.decode) for peer in self._peers}
        ours = partial(_last_of, times, partial(self.timed, rows))
        found = self._in_turn(ours, peers, WARM_UP_STEPS, steps)
        with split(self._executor) as watches:
            for number in range(-1, steps):
                seconds = self.timed(rows)
                parts = watches.take()
                if number >= 0:
                    found.parts.append({"step": seconds, **{name: parts[name] for name in PARTS}})
        return found

    def _in_turn(
        self,
        ours: Callable[[], float],
        peers: Mapping[str, Callable[[], float]],
        warm_up: int,
        steps: int,
    ) -> Timing:
        found = Timing([], [], {name: [] for name in peers}, [])
        for number in range(-warm_up, steps):
            self._settle()
            seconds, limits = ours(), self._probes.once()
            others = {}
            for name, call in peers.items():
                self._settle()
                others[name] = call()
            if number >= 0:
                found.plain.append(seconds)
                found.limits.append(limits)
                for name, theirs in others.items():
                    found.peers[name].append(theirs)
        return found

    def _settle(self) -> None:
        if self._peers:
            time.sleep(SETTLE_SECONDS)

    def prepared(self, batch: int, context: int) -> list[Row]:
        """Decode rows whose earlier tokens have been computed."""
        self._fill(batch, context)
        return self._decode_rows(batch, context)

    def _decode_rows(self, batch: int, context: int) -> list[Row]:
        return [
            self._row("decode", i, [1 + i], context - 1, self._blocks(context, i))
            for i in range(batch)
        ]

    @torch.inference_mode()
    def make_up_kv(self) -> None:
        """Fill the KV pool with random values: to decode, it only matters how many there are."""
        _, pool = self._executor._open()
        caches = [cache.view(-1) for layer in pool.layers for cache in layer]
        size = min(MADE_UP_VALUES, caches[0].numel())
        values = torch.randn(size, device=caches[0].device).to(caches[0].dtype)
        for cache in caches:
            for first in range(0, len(cache), size):
                part = cache[first : first + size]
                part.copy_(values[: len(part)])

    def decode_made_up(self, batch: int, context: int, steps: int) -> list[float]:
        """Seconds of decode steps as in `decode`, over whatever the KV pool holds."""
        rows = self._decode_rows(batch, context)
        return [self.timed(rows) for _ in range(WARM_UP_STEPS + steps)][WARM_UP_STEPS:]

    def timed_prompt(self, prompt: list[int]) -> float:
        """Seconds of a prompt of one chunk, and the token after it."""
        return self.timed([self._row("prefill", 0, prompt, 0, self._blocks(len(prompt), 0))])

    def timed(self, rows: Sequence[Row]) -> float:
        executor = self._executor
        self._step += 1
        plan = StepPlan(self._step, tuple(rows))
        begin = clock(executor.device)
        result = result_of(executor.step(plan))
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
            self.timed([self._row("prefill", 0, prompt[start : start + 512], start, table)])
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


class _Own:
    """Another executor of ours as a peer, on rows of its own."""

    def __init__(self, name: str, bench: Bench) -> None:
        self.name = name
        self._bench = bench
        self._rows: list[Row] = []

    def prepare(self, batch: int, context: int) -> None:
        self._rows = self._bench.prepared(batch, context)

    def decode(self) -> float:
        return self._bench.timed(self._rows)

    def prefill(self, prompt: list[int]) -> float:
        return self._bench.timed_prompt(prompt)

    def close(self) -> None:
        self._bench.close()


def _last_of(times: int, call: Callable[[], float]) -> float:
    return [call() for _ in range(times)][-1]


def _prompt(tokens: int, vocab_size: int) -> list[int]:
    """Some tokens, all of them in the tokenizer of any model."""
    return [(7 * i) % min(vocab_size, 256) for i in range(tokens)]
