"""Who gets KV blocks: growth of those who run, preemption when blocks run out, admission.

Admission reserves the prompt and one token more, not the lifetime: `max_tokens` may be the whole
context, and reserving that would let one client fill the pool.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from qwen3_asgi.scheduler.forks import can_ride, must_wait_for_parent, ride, stop_riders
from qwen3_asgi.scheduler.prefix import extend_digests
from qwen3_asgi.scheduler.request import Limits, Request, State

if TYPE_CHECKING:
    from collections.abc import Callable

    from qwen3_asgi.scheduler.blocks import BlockPool
    from qwen3_asgi.scheduler.queues import QueueTable


class Admission:
    """Owned by the scheduler thread.

    Args:
        offer: asked with the first request of `deferred` before it is admitted; true if it waits
            for a copy of its prefix instead.
    """

    def __init__(
        self,
        queues: QueueTable,
        pool: BlockPool,
        limits: Limits,
        offer: Callable[[Request], bool] | None = None,
    ) -> None:
        self._queues = queues
        self._pool = pool
        self._limits = limits
        self._offer = offer
        # Active requests whose next token has no slot yet.
        self.growing: list[Request] = []
        self._admissions = 0
        # Who did not fit, and when: nothing has changed as long as this has not.
        self._blocked: tuple[Request, int, int] | None = None

    def grow(self) -> list[Request]:
        """Reserve the slots of `growing`; returns who was preempted for it.

        When no block is left, the youngest running request of the least priority gives its blocks
        up and returns to the front of `deferred` with its tokens as prompt (preemption by
        recompute); most of them are still in the prefix cache when it comes back. The first always
        gets on, so the loop makes progress. While a step runs its requests can't be preempted; then
        who does not fit stays in `growing` and skips a step.
        """
        if not self.growing:
            return []
        preempted: list[Request] = []
        waiting: list[Request] = []
        for request in sorted(self.growing, key=_precedence):
            if request.state is not State.ACTIVE:
                continue
            missing = self._pool.blocks_for(len(request.token_ids)) - len(request.blocks)
            while missing > self._pool.available:
                victim = self._youngest()
                if victim is request and len(self._queues[State.INFLIGHT]):
                    waiting.append(request)
                    break
                self._preempt(victim)
                preempted.append(victim)
                if victim is request:
                    break
            else:
                extend(request, missing, self._pool)
        self.growing = waiting
        return preempted

    def admit(self) -> list[Request]:
        """Admit from `deferred`, first come first served in each priority.

        It stops at the first that does not fit: overtaking would starve long prompts.
        """
        queues, limits = self._queues, self._limits
        deferred = queues[State.DEFERRED]
        if not len(deferred):
            return []
        admitted: list[Request] = []
        aside: list[Request] = []
        prefill_tokens = sum(
            request.remaining_tokens for request in queues[State.PREFILLING] if not request.riding
        )
        try:
            while len(deferred) and queues.num_running < limits.max_batch:
                request = next(iter(deferred))
                if must_wait_for_parent(request):
                    aside.append(request)
                    deferred.discard(request)
                    continue
                if can_ride(request):
                    ride(request, queues)
                    self._number(request)
                    admitted.append(request)
                    continue
                if prefill_tokens >= limits.max_prefill_tokens:
                    break
                if self._offer is not None and self._offer(request):
                    continue
                if not self._reserve_prompt(request):
                    break
                queues.put(request, State.PREFILLING)
                self._number(request)
                prefill_tokens += request.remaining_tokens
                admitted.append(request)
        finally:  # also when the tiers end the loop: whoever is in no queue would get no end
            for request in reversed(aside):
                deferred.add(request, front=True)
        return admitted

    def _number(self, request: Request) -> None:
        self._admissions += 1
        request.admission = self._admissions

    def _preempt(self, request: Request) -> None:
        stop_riders(request, self._queues)
        give_back(request, self._pool)
        request.num_preemptions += 1
        request.offered_to_tiers = False
        request.riding = False
        self._queues.put(request, State.DEFERRED, front=True)

    def _reserve_prompt(self, request: Request) -> bool:
        pool, running = self._pool, self._queues.num_running
        state = (request, pool.version, running)
        if state == self._blocked:
            return False
        blocks = match_prefix(request, pool)
        missing = pool.blocks_for(len(request.token_ids) + 1) - len(blocks)
        # One block of headroom for each that runs: without it the newcomer would be preempted again
        # by their growth at once, and the pool would be recomputed forever.
        if missing + running > pool.available:
            pool.release(blocks)
            self._blocked = (request, pool.version, running)
            return False
        take(request, blocks, len(blocks) * pool.block_size, pool)
        extend(request, missing, pool)
        return True

    def _youngest(self) -> Request:
        """Of those that no step is running for."""
        return max(
            (r for state in (State.ACTIVE, State.PREFILLING) for r in self._queues[state]),
            key=_precedence,
        )


def match_prefix(request: Request, pool: BlockPool) -> list[int]:
    """Acquire the cached blocks that the request can begin with; hashes what is not hashed yet."""
    size = pool.block_size
    full = (len(request.token_ids) - 1) // size
    extend_digests(request.digests, request.cache_root, request.token_ids, size, full)
    return pool.match(request.token_ids, request.digests, request.cache_root)


def take(request: Request, blocks: list[int], num_computed: int, pool: BlockPool) -> None:
    """Begin with blocks that hold the KV of the first `num_computed` tokens already."""
    request.blocks = blocks
    request.capacity = len(blocks) * pool.block_size
    request.unforwarded += num_computed - request.num_computed
    request.num_computed = num_computed
    request.num_committed = num_computed // pool.block_size
    request.commit_at = (request.num_committed + 1) * pool.block_size


def extend(request: Request, count: int, pool: BlockPool) -> None:
    """Append `count` blocks to the request's table."""
    if count > 0:
        after = request.blocks[-1] if request.blocks else None
        request.blocks += pool.allocate(count, after)
        request.capacity = len(request.blocks) * pool.block_size


def give_back(request: Request, pool: BlockPool) -> None:
    """Release every block of a request and reset its chunk cursor."""
    pool.release(request.blocks)
    request.blocks = []
    request.row = None
    request.capacity = request.num_committed = 0
    request.unforwarded -= request.num_computed
    request.num_computed = 0


def _precedence(request: Request) -> tuple[int, int]:
    return request.priority, request.admission
