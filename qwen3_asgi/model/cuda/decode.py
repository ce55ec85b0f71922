"""Decode steps in CUDA graphs, launched before the host knows the tokens of the last one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from qwen3_asgi.model.cuda.attention import PIECE_TOKENS
from qwen3_asgi.model.cuda.capacity import buckets
from qwen3_asgi.model.cuda.reading import ReadingStep
from qwen3_asgi.model.cuda.sampling import Wishes, sample
from qwen3_asgi.scheduler.plan import SampleSpec, Sampling, StepResult

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from qwen3_asgi.model.batch import Batch
    from qwen3_asgi.model.cuda.inputs import DecodeInputs
    from qwen3_asgi.scheduler.plan import RequestId, RunningStep, StepPlan

    Run = Callable[[], Tensor]

# For rows that only fill a bucket up.
NO_WISH = SampleSpec(Sampling(temperature=0.0), 0)
# Programs for pieces beyond a sequence's end leave at once, but not for free: graphs are captured
# for contexts of 1, 4, 16, … pieces.
PIECES_GROWTH = 4


class CudaDecode:
    """Runs decode steps of at most `max_batch` rows without adapters. Used by one thread.

    Args:
        forward: float32 logits `[bucket, vocab]` of a batch of decode rows, by operations that may
            be captured. Called under `torch.inference_mode`.
        unowned: ids that stand for no token, int64 on the device.
        capture: turns a run into its replay; a `graphs.GraphCapture` on CUDA.
    """

    def __init__(
        self,
        forward: Callable[[Batch], Tensor],
        inputs: DecodeInputs,
        *,
        max_batch: int,
        max_tokens: int,
        vocab_size: int,
        unowned: Tensor,
        capture: Callable[[Run], Run],
    ) -> None:
        self._forward = forward
        self._inputs = inputs
        self._max_tokens = max_tokens
        self._vocab_size = vocab_size
        self._unowned = unowned
        self._capture = capture
        self.batch_buckets = buckets(max_batch)
        self.piece_buckets = piece_buckets(max_tokens)
        self._graphs: dict[tuple[int, int], Run] = {}
        # Every graph writes here and nothing else of it is read, so all may share their memory.
        self._logits = torch.empty(
            max_batch, vocab_size, dtype=torch.float32, device=unowned.device
        )
        self._step = -1
        self._known: Mapping[RequestId, int] = {}
        self._samples: Tensor | None = None

    @torch.inference_mode()
    def start(self, capture: Callable[[Run], Run] | None = None) -> None:
        """Capture every graph, by `capture` if given. Nothing is written to the KV pool."""
        capture = capture or self._capture
        # The largest first: tables that grow are then as large as they get, which no graph but the
        # first could know of, and the memory that graphs share is found whole by the smaller ones.
        for pieces in reversed(self.piece_buckets):
            for bucket in reversed(self.batch_buckets):
                self._inputs.fill((), bucket, {}, None)
                last = min(pieces * PIECE_TOKENS, self._max_tokens) - 1
                self._graphs[bucket, pieces] = capture(self._bound(bucket, last))

    def takes(self, plan: StepPlan) -> bool:
        """Whether `step` can run it; others go the general way, and end with `remember`."""
        return (
            plan.kind == "decode"
            and len(plan.rows) <= self.batch_buckets[-1]
            and all(row.adapter is None and row.sample is not None for row in plan.rows)
        )

    @torch.inference_mode()
    def step(self, plan: StepPlan) -> StepResult | RunningStep:
        """Launch a decode step; returns before the device has run it.

        Raises:
            ValueError: a row that cannot be run; nothing was launched then.
        """
        rows = [row for row in plan.rows if not row.dropped]
        if not rows:
            self.remember(plan.step, (), None)
            return StepResult({})
        specs = [row.sample or NO_WISH for row in rows]
        bucket = smallest(self.batch_buckets, len(rows))
        self._inputs.fill(rows, bucket, *self.known(plan))
        pieces = smallest(self.piece_buckets, _pieces(max(row.start for row in rows) + 1))
        # Before the graph, so that the device finds everything there when it is through with it.
        wishes = Wishes.of(specs, self._vocab_size, self._unowned.device)
        logits = self._graphs[bucket, pieces]()
        # Sampling overwrites; the next step does, too. The rest of the bucket is nobody's.
        samples = sample(logits[: len(rows)], wishes, self._unowned)
        samples = samples._replace(tokens=self._inputs.mark_lost(samples.tokens))
        self.remember(plan.step, [row.request_id for row in rows], samples.tokens)
        return ReadingStep(
            [row.request_id for row in rows],
            [spec.sampling.logprobs for spec in specs],
            samples,
        )

    def known(self, plan: StepPlan) -> tuple[Mapping[RequestId, int], Tensor | None]:
        """Index by request into the tokens of the step that `plan` is behind, and those tokens."""
        if plan.behind is None or plan.behind != self._step:
            return {}, None
        return self._known, self._samples

    def remember(self, step: int, request_ids: Sequence[RequestId], tokens: Tensor | None) -> None:
        """What step number `step` samples, int64 on the device, for the one behind it."""
        self._step = step
        self._known = {request_id: i for i, request_id in enumerate(request_ids)}
        self._samples = tokens

    def _bound(self, bucket: int, last_position: int) -> Run:
        batch = self._inputs.batch(bucket, last_position)
        target = self._logits[:bucket]
        return lambda: target.copy_(self._forward(batch))


def piece_buckets(max_tokens: int) -> Sequence[int]:
    """Numbers of pieces to capture; the last covers `max_tokens`."""
    longest = _pieces(max_tokens)
    found = [1]
    while found[-1] < longest:
        found.append(min(found[-1] * PIECES_GROWTH, longest))
    return found


def smallest(sizes: Sequence[int], wanted: int) -> int:
    """The first of ascending `sizes` that holds `wanted`.

    Raises:
        ValueError: none does.
    """
    for size in sizes:
        if size >= wanted:
            return size
    raise ValueError(f"{wanted} is more than the largest bucket, {sizes[-1]}")


def _pieces(num_tokens: int) -> int:
    return -(-num_tokens // PIECE_TOKENS)
