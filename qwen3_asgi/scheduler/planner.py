"""Queues in, `StepPlan` out: decode rows for all active requests, then prefill chunks in order.

The blocks were reserved before (`admission`); only a step that is launched ahead takes its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from qwen3_asgi.scheduler.admission import extend
from qwen3_asgi.scheduler.effects import row_ahead, sample_spec
from qwen3_asgi.scheduler.plan import Row

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from qwen3_asgi.scheduler.blocks import BlockPool
    from qwen3_asgi.scheduler.request import Request


def decoding(active: Iterable[Request], growing: Collection[Request]) -> list[Request]:
    """Who decodes in the next step: all but those that have no slot for their next token."""
    if not growing:
        return list(active)
    return [request for request in active if len(request.token_ids) <= request.capacity]


def ahead_of(
    step: Iterable[Request], pool: BlockPool, growing: Collection[Request]
) -> list[Request]:
    """Of those whose decode step runs, who can be launched again before its tokens are known.

    Their `row` is the new one then. Left out is who will have reached its `max_tokens`, was
    cancelled, or finds no block for the token after next; no block is taken while others wait.
    """
    ahead: list[Request] = []
    for request in step:
        length = len(request.token_ids) + 1
        if request.finished or request.leaving or length >= request.end_len:
            continue
        if length > request.capacity:
            if growing or not pool.available:
                continue
            extend(request, 1, pool)
        request.row = row_ahead(request)
        ahead.append(request)
    return ahead


def prefill_rows(
    prefilling: Iterable[Request], max_prefill_tokens: int
) -> list[tuple[Request, Row]]:
    """Chunks in order of admission, of at most `max_prefill_tokens` tokens together.

    That bound is also the most that a long prompt can hold up the tokens of those who decode.
    """
    rows: list[tuple[Request, Row]] = []
    budget = max_prefill_tokens
    for request in prefilling:
        if budget <= 0:
            break
        if request.riding:
            continue
        size = min(request.remaining_tokens, budget)
        rows.append((request, _prefill_row(request, size)))
        budget -= size
    return rows


def _prefill_row(request: Request, size: int) -> Row:
    start = request.num_computed
    end = start + size
    return Row(
        request_id=request.id,
        kind="prefill",
        token_ids=request.token_ids[start:end],
        start=start,
        block_table=request.blocks,
        sample=sample_spec(request) if end == len(request.token_ids) else None,
        adapter=request.adapter,
    )
