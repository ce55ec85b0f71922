"""Who gets KV blocks: growth of those who run, preemption when blocks run out, admission.

Admission reserves the prompt and one token more, not the lifetime: `max_tokens` may be the whole
context, and reserving that would let one client fill the pool.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from qwen3_asgi.scheduler.request import Limits, Request, State

if TYPE_CHECKING:
    from qwen3_asgi.scheduler.blocks import BlockPool
    from qwen3_asgi.scheduler.queues import QueueTable


def grow_active(queues: QueueTable, pool: BlockPool) -> list[Request]:
    """Reserve the slot of each active request's next token; returns who was preempted for it.

    When no block is left, the youngest running request gives its blocks up and returns to the front
    of `deferred` with its tokens as prompt (preemption by recompute); most of them are still in the
    prefix cache when it comes back. The oldest always gets on, so the loop makes progress.
    """
    preempted: list[Request] = []
    for request in list(queues[State.ACTIVE].values()):
        if request.state is not State.ACTIVE:
            continue  # preempted for an older one a moment ago
        missing = pool.blocks_for(len(request.token_ids)) - len(request.blocks)
        while missing > pool.available:
            victim = _youngest(queues)
            preempt(victim, queues, pool)
            preempted.append(victim)
            if victim is request:
                break
        else:
            _extend(request, missing, pool)
    return preempted


def preempt(request: Request, queues: QueueTable, pool: BlockPool) -> None:
    """Take a running request's blocks and put it back to the front of `deferred`."""
    give_back(request, pool)
    request.num_preemptions += 1
    queues.put(request, State.DEFERRED, front=True)


def admit(queues: QueueTable, pool: BlockPool, limits: Limits) -> list[tuple[Request, int]]:
    """Admit from `deferred`, first come first served; returns each with its cached token count.

    It stops at the first that does not fit: overtaking would starve long prompts.
    """
    admitted: list[tuple[Request, int]] = []
    prefill_tokens = sum(r.remaining_tokens for r in queues[State.PREFILLING].values())
    deferred = queues[State.DEFERRED]
    while deferred and queues.num_running < limits.max_batch:
        if prefill_tokens >= limits.max_prefill_tokens:
            break
        request = next(iter(deferred.values()))
        if not _reserve_prompt(request, queues.num_running, pool):
            break
        queues.put(request, State.PREFILLING)
        prefill_tokens += request.remaining_tokens
        admitted.append((request, request.num_computed))
    return admitted


def give_back(request: Request, pool: BlockPool) -> None:
    """Release every block of a request and reset its chunk cursor."""
    pool.release(request.blocks)
    request.blocks = []
    request.block_digests = []
    request.num_computed = 0


def _reserve_prompt(request: Request, num_running: int, pool: BlockPool) -> bool:
    blocks, digests = pool.match(request.token_ids, request.cache_salt)
    missing = pool.blocks_for(len(request.token_ids) + 1) - len(blocks)
    # One block of headroom for each that runs: without it the newcomer would be preempted again by
    # their growth at once, and the pool would be recomputed forever.
    if missing + num_running > pool.available:
        pool.release(blocks)
        return False
    request.blocks, request.block_digests = blocks, digests
    request.num_computed = len(blocks) * pool.block_size
    _extend(request, missing, pool)
    return True


def _extend(request: Request, count: int, pool: BlockPool) -> None:
    if count > 0:
        after = request.blocks[-1] if request.blocks else None
        request.blocks += pool.allocate(count, after)


def _youngest(queues: QueueTable) -> Request:
    # Requests move from `prefilling` to `active` in the order of their admission, so the last of
    # `prefilling`, else the last of `active`, was admitted last.
    queue = queues[State.PREFILLING] or queues[State.ACTIVE]
    return next(reversed(queue.values()))
