"""Steps on CUDA that the host does not wait for: decode in graphs, all others one by one."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from qwen3_asgi.model.cuda.decode import CudaDecode
from qwen3_asgi.model.cuda.graphs import GraphCapture
from qwen3_asgi.model.cuda.inputs import MISSING, DecodeInputs
from qwen3_asgi.model.cuda.operators import CudaOperators
from qwen3_asgi.model.cuda.reading import ReadingStep
from qwen3_asgi.model.cuda.sampling import NO_TOKEN_BEFORE, Wishes, sample
from qwen3_asgi.model.cuda.varlen import choose_varlen, find_varlen
from qwen3_asgi.model.self_check import CHUNKS, SINGLE, Trial
from qwen3_asgi.model.upload import upload
from qwen3_asgi.scheduler.plan import PENDING, StepResult

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from qwen3_asgi.model.batch import Batch
    from qwen3_asgi.model.config import ModelConfig
    from qwen3_asgi.model.cuda.decode import Run
    from qwen3_asgi.model.kv import KVPool
    from qwen3_asgi.model.qwen3 import Qwen3
    from qwen3_asgi.scheduler.plan import RequestId, Row, RunningStep, StepPlan

    # Rows, and what is done to their batch before its layers run -> hidden states [T, hidden].
    Forward = Callable[[Sequence[Row], Callable[[Batch], None]], tuple[Batch, Tensor, Qwen3]]

logger = logging.getLogger(__name__)


class CudaSteps:
    """`decode` runs what it takes; `step` is for everything else.

    Prefill steps may run beside decode steps, on another thread with a stream of its own.
    """

    def __init__(self, decode: CudaDecode, vocab_size: int, unowned: Tensor) -> None:
        self.decode = decode
        self._vocab_size = vocab_size
        self._unowned = unowned

    def step(self, plan: StepPlan, forward: Forward) -> StepResult | RunningStep:
        """Launch a step of any rows; one that samples nothing is still to be waited for.

        Raises:
            ValueError: a row that cannot be run; nothing was launched then.
        """
        # What steps hand on is the decode thread's.
        alone = plan.kind == "prefill"
        rows: Sequence[Row] = plan.rows
        feed = _Feed({}, None)
        if not alone:
            rows = [row for row in rows if not row.dropped]
            if not rows:
                self.decode.remember(plan.step, (), None)
                return StepResult({})
            feed = _Feed(*self.decode.known(plan))
            rows = feed.take(rows)
        batch, hidden, model = forward(rows, feed)
        sampled = [
            (row, last, row.sample)
            for row, last in zip(rows, batch.last_rows, strict=True)
            if row.sample is not None
        ]
        request_ids = [row.request_id for row, _, _ in sampled]
        if not sampled:
            if not alone:
                self.decode.remember(plan.step, (), None)
            return StepResult({})
        device = hidden.device
        last_rows = upload([last for _, last, _ in sampled], torch.int64, device)
        specs = [spec for _, _, spec in sampled]
        wishes = Wishes.of(specs, self._vocab_size, device)
        logits = model.logits(hidden.index_select(0, last_rows)).float()
        samples = sample(logits, wishes, self._unowned)
        samples = samples._replace(tokens=feed.mark_lost(samples.tokens, request_ids))
        if not alone:
            self.decode.remember(plan.step, request_ids, samples.tokens)
        return ReadingStep(request_ids, [spec.sampling.logprobs for spec in specs], samples)


class _Feed:
    """Puts the last step's samples in place of pending tokens, as `DecodeInputs` does.

    Args:
        known: index into `samples` by request.
        samples: int64 tokens of the step before, or a negative code; on the device.
    """

    def __init__(self, known: Mapping[RequestId, int], samples: Tensor | None) -> None:
        self._known = known
        self._samples = samples
        # Which rows wait for a token, and whose they are.
        self._waiting: list[int] = []
        self._request_ids: list[RequestId] = []
        self._lost: Tensor | None = None

    def take(self, rows: Sequence[Row]) -> Sequence[Row]:
        """The same rows, with some token or other where one is pending."""
        self._waiting = [i for i, row in enumerate(rows) if row.token_ids[0] == PENDING]
        self._request_ids = [rows[i].request_id for i in self._waiting]
        if not self._waiting:
            return rows
        return [replace(row, token_ids=[0]) if row.token_ids[0] == PENDING else row for row in rows]

    def __call__(self, batch: Batch) -> None:
        """Write the tokens into the batch of these rows."""
        if not self._waiting:
            return
        device = batch.token_ids.device
        index = upload([batch.last_rows[i] for i in self._waiting], torch.int64, device)
        take = upload([self._known.get(i, MISSING) for i in self._request_ids], torch.int64, device)
        found = take
        if self._samples is not None:
            found = torch.where(take < 0, take, self._samples[take.clamp(min=0)])
        self._lost = found < 0
        batch.token_ids.index_copy_(0, index, found.clamp(min=0))
        # Such a row ends with an error; until then it must not write what is no token's.
        slots = batch.slots.index_select(0, index).masked_fill_(self._lost, -1)
        batch.slots.index_copy_(0, index, slots)

    def mark_lost(self, tokens: Tensor, request_ids: Sequence[RequestId]) -> Tensor:
        """`tokens` of these requests, with a code where there was no token to go on from."""
        if self._lost is None:
            return tokens
        place = {request_id: i for i, request_id in enumerate(request_ids)}
        index = upload([place[i] for i in self._request_ids], torch.int64, tokens.device)
        marked = tokens.index_select(0, index).masked_fill_(self._lost, NO_TOKEN_BEFORE)
        return tokens.index_copy(0, index, marked)


def open_steps(
    model: Qwen3,
    pool: KVPool,
    config: ModelConfig,
    unowned: Tensor,
    *,
    max_batch: int,
    max_tokens: int,
    capture: Callable[[Run], Run] | None = None,
) -> CudaSteps | None:
    """Steps of a model whose operators are `CudaOperators`, with all graphs captured; else None.

    Also None for operators in one order: their tiles are laid out anew for each step, which no
    graph can do, and the host's sampler keeps that order too.

    Args:
        unowned: ids that stand for no token, int64 on the device.
        max_batch: most rows of a decode step.
        max_tokens: of a sequence.
        capture: in place of `GraphCapture`; tests call what is to be captured.
    """
    operators = model.operators
    if not isinstance(operators, CudaOperators) or operators.one_order:
        return None
    operators.varlen = _varlen(operators, config, pool)
    decode = CudaDecode(
        lambda batch: model.logits(model.forward(batch, pool)).float(),
        DecodeInputs(
            max_batch=max_batch,
            max_tokens=min(max_tokens, pool.num_blocks * pool.block_size),
            block_size=pool.block_size,
            num_blocks=pool.num_blocks,
            vocab_size=config.vocab_size,
            device=unowned.device,
        ),
        max_batch=max_batch,
        max_tokens=min(max_tokens, pool.num_blocks * pool.block_size),
        vocab_size=config.vocab_size,
        unowned=unowned,
        capture=capture or GraphCapture(),
    )
    try:
        decode.start()
    except RuntimeError as error:
        if capture is not None:
            raise
        logger.warning("CUDA graphs: not used, capturing failed (%s); decode is slower", error)
        decode.start(lambda run: run)
    return CudaSteps(decode, config.vocab_size, unowned)


def _varlen(
    operators: CudaOperators, config: ModelConfig, pool: KVPool
) -> Callable[..., Tensor] | None:
    """torch's own paged attention, if it gives for this pool what our kernels give."""
    keys = pool.layers[0].keys
    trial = Trial(config, keys.dtype, keys.device, pool.block_size)

    def run(function: Callable[..., Tensor]) -> tuple[Tensor, Tensor]:
        wanted = trial.attention(operators, (*SINGLE, *CHUNKS))[0]
        operators.varlen = function
        try:
            return trial.attention(operators, (*SINGLE, *CHUNKS))[0], wanted
        finally:
            operators.varlen = None

    if keys.device.type != "cuda":
        return operators.varlen
    return choose_varlen(find_varlen(), run)
