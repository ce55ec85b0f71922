"""Drives an executor by hand: sequences with block tables of the test's own making."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from qwen3_asgi.scheduler.plan import RequestId, Row, SampleSpec, Sampling, StepPlan, result_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from qwen3_asgi.model.executor import TorchExecutor

GREEDY = Sampling(temperature=0.0)


class Sequence_:
    """One request: its tokens, how many are forwarded, and its blocks."""

    def __init__(
        self,
        name: str,
        prompt: Sequence[int],
        blocks: Sequence[int],
        *,
        computed: int = 0,
        sampling: Sampling = GREEDY,
    ) -> None:
        self.name = RequestId(name)
        self.tokens = list(prompt)
        self.prompt_len = len(prompt)
        self.blocks = list(blocks)
        self.computed = computed
        self.sampling = sampling

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt_len :]

    def row(self, length: int | None = None) -> Row:
        """The next row: everything not yet forwarded, or `length` tokens of it."""
        end = len(self.tokens) if length is None else self.computed + length
        whole = end == len(self.tokens)
        chunk = self.tokens[self.computed : end]
        return Row(
            request_id=self.name,
            kind="decode" if len(chunk) == 1 and self.output else "prefill",
            token_ids=chunk,
            start=self.computed,
            block_table=self.blocks,
            sample=SampleSpec(self.sampling, len(self.output)) if whole else None,
        )


@torch.inference_mode()
def poison(executor: TorchExecutor, blocks: Sequence[int]) -> None:
    """Fill blocks with NaN: what an earlier owner left there must never be read."""
    slots = [
        block * executor.block_size + i for block in blocks for i in range(executor.block_size)
    ]
    _, pool = executor._loaded
    for layer in pool.layers:
        layer.keys[:, slots] = float("nan")
        layer.values[:, slots] = float("nan")


class Driver:
    def __init__(self, executor: TorchExecutor) -> None:
        self.executor = executor
        self.step_count = 0

    def step(self, *parts: Sequence_ | tuple[Sequence_, int]) -> None:
        """Forward the rest of each sequence, or a given number of its tokens."""
        pairs = [part if isinstance(part, tuple) else (part, None) for part in parts]
        rows = tuple(sequence.row(length) for sequence, length in pairs)
        result = result_of(self.executor.step(StepPlan(self.step_count, rows)))
        self.step_count += 1
        assert not result.errors
        for (sequence, _), row in zip(pairs, rows, strict=True):
            sequence.computed += len(row.token_ids)
            if row.sample is not None:
                sequence.tokens.append(result.tokens[sequence.name].token_id)

    def run(self, sequence: Sequence_, num_tokens: int, beside: Iterable[Sequence_] = ()) -> None:
        """Step until `sequence` has `num_tokens` of output."""
        while len(sequence.output) < num_tokens:
            self.step(*beside, sequence)
