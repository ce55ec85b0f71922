"""Queues in, `StepPlan` out: decode rows for all active requests, then prefill chunks in order.

A pure function: the blocks were reserved before (`admission`), nothing is changed here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from qwen3_asgi.scheduler.plan import Row, RowKind, SampleSpec, StepPlan

if TYPE_CHECKING:
    from collections.abc import Iterable

    from qwen3_asgi.scheduler.request import Request


def plan_step(
    step: int, active: Iterable[Request], prefilling: Iterable[Request], max_prefill_tokens: int
) -> StepPlan | None:
    """The next step, or None if nothing is admitted.

    `max_prefill_tokens` bounds the prompt tokens of the step, so that a long prompt cannot hold up
    the tokens of those who decode for longer than one chunk.
    """
    rows = [_row(request, "decode", 1) for request in active]
    budget = max_prefill_tokens
    for request in prefilling:
        if budget <= 0:
            break
        size = min(request.remaining_tokens, budget)
        rows.append(_row(request, "prefill", size))
        budget -= size
    return StepPlan(step, tuple(rows)) if rows else None


def _row(request: Request, kind: RowKind, size: int) -> Row:
    start = request.num_computed
    end = start + size
    last = end == len(request.token_ids)
    return Row(
        request_id=request.id,
        kind=kind,
        token_ids=request.token_ids[start:end],
        start=start,
        block_table=request.blocks,
        sample=_sample_spec(request) if last else None,
    )


def _sample_spec(request: Request) -> SampleSpec:
    position = request.num_output_tokens
    banned: tuple[int, ...] = ()
    if position < request.min_tokens:
        banned = tuple(sorted(request.eos_token_ids | request.stop_token_ids))
    return SampleSpec(request.sampling, position, banned)
