"""A step's result applied to the requests that were in it: cursor, prefix cache, token, end."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from qwen3_asgi.errors import GenerationFailed
from qwen3_asgi.scheduler.events import Finish, FinishReason
from qwen3_asgi.scheduler.prefix import root_digest

if TYPE_CHECKING:
    from qwen3_asgi.scheduler.blocks import BlockPool
    from qwen3_asgi.scheduler.plan import Row, SampledToken
    from qwen3_asgi.scheduler.request import Request

logger = logging.getLogger(__name__)


def advance(request: Request, row: Row, pool: BlockPool) -> None:
    """The row's tokens are in the KV cache now: move the cursor, share the blocks that got full."""
    computed = row.start + len(row.token_ids)
    request.num_computed = computed
    request.forwarded_tokens += len(row.token_ids)
    size = pool.block_size
    digests = request.block_digests
    while (len(digests) + 1) * size <= computed:
        index = len(digests)
        parent = digests[-1] if digests else root_digest(request.cache_salt)
        tokens = request.token_ids[index * size : (index + 1) * size]
        digests.append(pool.commit(request.blocks[index], parent, tokens))


def append_token(request: Request, token: SampledToken) -> Finish | None:
    """Add a sampled token; returns the `Finish` if it ends the request."""
    request.token_ids.append(token.token_id)
    token_id = token.token_id
    output = request.num_output_tokens
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
    if request.max_tokens is not None and output >= request.max_tokens:
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
    return Finish(
        reason=reason,
        prompt_tokens=request.prompt_len,
        cached_tokens=request.cached_tokens,
        completion_tokens=request.num_output_tokens,
        stop_reason=stop_reason,
        stop_token=stop_token,
        error=error,
    )
