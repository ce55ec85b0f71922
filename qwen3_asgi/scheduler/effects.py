"""A step's result applied to the requests that were in it: cursor, prefix cache, token, end."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from qwen3_asgi.errors import GenerationFailed
from qwen3_asgi.scheduler.events import Event, Finish, FinishReason
from qwen3_asgi.scheduler.plan import PENDING, Row, SampleSpec
from qwen3_asgi.scheduler.prefix import extend_digests

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from qwen3_asgi.scheduler.blocks import BlockPool
    from qwen3_asgi.scheduler.plan import RequestId, SampledToken
    from qwen3_asgi.scheduler.request import Request

logger = logging.getLogger(__name__)

_new = tuple.__new__


def apply_decoded(
    requests: Iterable[Request],
    tokens: Mapping[RequestId, SampledToken],
    now: float,
    pool: BlockPool,
    events: list[Event],
    growing: list[Request],
    intervals: dict[float, int],
) -> list[tuple[Request, SampledToken | None]]:
    """Apply a decode step's tokens, and write each request's next row into its `row`.

    The one loop of the scheduler that runs for every token, so it does little and makes nothing but
    the event: `Event(…)` would cost as much as all the rest. Tokens that may end their request, and
    requests that got none, are returned for a closer look. `growing` gets those who need a block
    before their next step; `intervals` counts the seconds since the token before. Of those for whom
    a step was launched ahead, `row` is that step's, and is left alone.
    """
    odd: list[tuple[Request, SampledToken | None]] = []
    get, emit = tokens.get, events.append
    before: float | None = None
    count = 0
    for request in requests:
        token = get(request.id)
        row = request.row
        if token is None or row is None or row.sample is None:
            odd.append((request, None))
            continue
        token_id = token[0]
        ids = request.token_ids
        ids.append(token_id)
        length = len(ids)
        computed = request.num_computed = length - 1
        if row.start != computed:
            row.start = computed
            row.token_ids[0] = token_id
            row.sample.position += 1
        if length > request.commit_at:
            commit_full(request, pool)
        if length > request.capacity:
            growing.append(request)
        if request.last_token_at != before:
            if before is not None:
                intervals[now - before] = intervals.get(now - before, 0) + count
            before, count = request.last_token_at, 0
        count += 1
        request.last_token_at = now
        if request.watched or length >= request.end_len or token_id in request.end_token_ids:
            odd.append((request, token))
        else:
            emit(_new(Event, (request.id, token, None)))
    if before is not None:
        intervals[now - before] = intervals.get(now - before, 0) + count
    return odd


def advance(request: Request, row: Row, pool: BlockPool) -> None:
    """The row's tokens are in the KV cache now: move the cursor, share the blocks that got full."""
    request.num_computed = row.start + len(row.token_ids)
    if request.num_computed >= request.commit_at:
        commit_full(request, pool)


def commit_full(request: Request, pool: BlockPool) -> None:
    """Offer the blocks that are full now to the prefix cache."""
    size = pool.block_size
    full = request.num_computed // size
    extend_digests(request.digests, request.cache_root, request.token_ids, size, full)
    for index in range(request.num_committed, full):
        parent = request.digests[index - 1] if index else request.cache_root
        tokens = request.token_ids[index * size : (index + 1) * size]
        pool.commit(request.blocks[index], request.digests[index], parent, tokens)
    request.num_committed = full
    request.commit_at = (full + 1) * size


def begin_decoding(request: Request) -> None:
    """After the first token: the row that all further steps write over."""
    request.row = Row(
        request_id=request.id,
        kind="decode",
        token_ids=request.token_ids[-1:],
        start=len(request.token_ids) - 1,
        block_table=request.blocks,
        sample=sample_spec(request),
        adapter=request.adapter,
    )


def row_ahead(request: Request) -> Row:
    """The row of the step after the one that runs; the token between them is not known yet."""
    return Row(
        request_id=request.id,
        kind="decode",
        token_ids=[PENDING],
        start=len(request.token_ids),
        block_table=request.blocks,
        sample=sample_spec(request, ahead=1),
        adapter=request.adapter,
    )


def sample_spec(request: Request, *, ahead: int = 0) -> SampleSpec:
    position = request.num_output_tokens + ahead
    banned: tuple[int, ...] = ()
    if position < request.min_tokens:
        banned = tuple(sorted(request.end_token_ids))
    return SampleSpec(request.sampling, position, banned)


def check_end(request: Request, token: SampledToken) -> Finish | None:
    """Whether the request ends with its last token, which was appended already."""
    token_id = token.token_id
    output = request.num_output_tokens
    row = request.row
    if output >= request.min_tokens and row is not None and row.sample is not None:
        row.sample.banned_token_ids = ()
        request.watched = request.stop_check is not None
    if output > request.min_tokens:
        if token_id in request.eos_token_ids:
            return finish(request, "stop", stop_token=token_id)
        if token_id in request.stop_token_ids:
            return finish(request, "stop", stop_reason=token_id, stop_token=token_id)
    if request.stop_check is not None:
        try:
            matched = request.stop_check(token_id)
        except Exception as error:
            logger.exception("the stop check of request %s failed", request.id)
            failure = GenerationFailed(f"the stop check failed: {error}")
            return finish(request, "error", error=failure)
        if matched is not None:
            return finish(request, "stop", stop_reason=matched)
    if len(request.token_ids) >= request.end_len:
        return finish(request, "length")
    return None


def finish(
    request: Request,
    reason: FinishReason,
    *,
    stop_reason: int | str | None = None,
    stop_token: int | None = None,
    error: Exception | None = None,
) -> Finish:
    """The terminal value of a request as it stands."""
    prompt_len = request.prompt_len
    completion_tokens = len(request.token_ids) - prompt_len
    # As for `Event` above: a sweep may end thousands at once.
    return _new(
        Finish,
        (
            reason,
            prompt_len,
            request.cached_tokens,
            completion_tokens,
            stop_reason,
            stop_token,
            error,
        ),
    )
