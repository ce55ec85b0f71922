"""n > 1: several outputs of one prompt, which is prefilled once.

The forks of a request are admitted beside it and ride on its prefill. When that is done they share
its full blocks, get a copy of the last one, and differ from then on (copy on write, as in
PagedAttention). A fork whose parent is gone, or that finds no block, is an ordinary request: the
prefix cache gives it most of the prompt.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from qwen3_asgi.scheduler.request import Request, State

if TYPE_CHECKING:
    from collections.abc import Callable

    from qwen3_asgi.scheduler.blocks import BlockPool
    from qwen3_asgi.scheduler.executor import ModelExecutor
    from qwen3_asgi.scheduler.queues import QueueTable

logger = logging.getLogger(__name__)


def can_ride(request: Request) -> bool:
    """Whether the parent's prefill is running, so that this one need not do it again."""
    parent = request.fork_of
    return (
        parent is not None
        and parent.state in (State.PREFILLING, State.INFLIGHT)
        and not parent.riding
        and parent.first_token_at is None
        and len(request.token_ids) == request.prompt_len
    )


def must_wait_for_parent(request: Request) -> bool:
    """Whether the parent is ahead of it, and about to prefill what both need."""
    parent = request.fork_of
    return (
        parent is not None
        and parent.first_token_at is None
        and parent.state in (State.DEFERRED, State.LOADING, State.POST_CONTROL_DEFERRED)
        and len(request.token_ids) == request.prompt_len
    )


def ride(request: Request, queues: QueueTable) -> None:
    request.riding = True
    queues.put(request, State.PREFILLING)


def stop_riders(parent: Request, queues: QueueTable) -> None:
    """The parent's prefill will not be finished: its riders wait for another chance, in order."""
    for fork in reversed(parent.forks):
        if fork.riding:
            fork.riding = False
            queues.put(fork, State.DEFERRED, front=True)


def fork_riders(
    parent: Request,
    queues: QueueTable,
    pool: BlockPool,
    executor: ModelExecutor,
    before_write: Callable[[], None],
) -> None:
    """The parent's prompt is in the cache: give its riders their blocks.

    All that is left to forward for them is the prompt's last token, whose logits they sample.
    """
    riders = [fork for fork in parent.forks if fork.riding]
    if not riders:
        return
    size, computed = pool.block_size, parent.prompt_len - 1
    full = computed // size
    pairs: list[tuple[int, int]] = []
    forked: list[Request] = []
    for fork in riders:
        missing = pool.blocks_for(parent.prompt_len + 1) - full
        if missing + queues.num_running > pool.available:
            break
        own = pool.allocate(missing, None)
        shared = parent.blocks[:full]
        pool.share(shared)
        if computed % size:
            pairs.append((parent.blocks[full], own[0]))
        fork.riding = False
        fork.blocks = shared + own
        fork.capacity = len(fork.blocks) * size
        fork.unforwarded += computed
        fork.num_computed = fork.cached_tokens = computed
        fork.digests = parent.digests[:full]
        fork.num_committed = full
        fork.commit_at = (full + 1) * size
        forked.append(fork)
    stop_riders(parent, queues)  # those that found no block
    try:
        if pairs:
            before_write()
            executor.copy_blocks(pairs)
    except Exception:
        logger.exception("copying the last block for %d forks failed", len(pairs))
        for fork in reversed(forked):
            pool.release(fork.blocks)
            fork.blocks = []
            fork.unforwarded -= computed
            fork.num_computed = fork.capacity = fork.num_committed = 0
            queues.put(fork, State.DEFERRED, front=True)
