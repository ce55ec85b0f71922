"""The machine of the invariants is worth something: it finds each of these planted bugs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from qwen3_asgi.scheduler import admission, arrivals, effects, endings, loading, prefix
from qwen3_asgi.scheduler.admission import Admission, give_back
from qwen3_asgi.scheduler.blocks import BlockPool
from qwen3_asgi.scheduler.effects import finish
from qwen3_asgi.scheduler.events import Event
from qwen3_asgi.scheduler.loop import Scheduler
from qwen3_asgi.scheduler.plan import Row
from qwen3_asgi.scheduler.prefix import extend_digests, root_digest
from qwen3_asgi.scheduler.request import Request, State
from qwen3_asgi.scheduler.steps import Steps
from qwen3_asgi.scheduler.sweep import Sweeper, collect
from qwen3_asgi.scheduler.tiers import Level
from tests.scheduler.machine import random_life
from tests.scheduler.tier_life import tier_life

if TYPE_CHECKING:
    from qwen3_asgi.scheduler.plan import RequestId, StepResult

Mutation = Callable[[pytest.MonkeyPatch], None]
NUM_LIVES = 300
NUM_TIER_LIVES = 20


def sweep_rereads_who_is_cancelled(patch: pytest.MonkeyPatch) -> None:
    """Release by one reading of the cancels, leave the queues by another."""

    def sweep(self: Sweeper) -> None:
        due = collect(self._inbox.take_cancelled(), self.carried, self._queues).due
        for request, _ in due:
            if request.admitted:
                self._endings._executor.drop_request(request.id)
            give_back(request, self._endings._pool)
            self._endings.events.append(Event(request.id, None, finish(request, "abort")))
        reread = collect(self._inbox.take_cancelled(), {}, self._queues).due
        for request, _ in {request.id: (request, _) for request, _ in due + reread}.values():
            self._queues.remove(request)

    patch.setattr(Sweeper, "sweep", sweep)


def load_is_published_before_the_sweep(patch: pytest.MonkeyPatch) -> None:
    sweep, publish = Sweeper.sweep, Scheduler._publish
    swept: dict[int, int] = {}

    def publish_then_sweep(self: Scheduler) -> None:
        publish(self)
        if swept.get(id(self)) != self._iteration:
            swept[id(self)] = self._iteration
            sweep(self._sweeper)

    patch.setattr(Sweeper, "sweep", lambda self: None)
    patch.setattr(Scheduler, "_publish", publish_then_sweep)


def swept_blocks_are_not_released(patch: pytest.MonkeyPatch) -> None:
    def forget(request: Request, pool: BlockPool) -> None:
        request.blocks = []

    patch.setattr(endings, "give_back", forget)


def blocks_in_flight_are_released_at_once(patch: pytest.MonkeyPatch) -> None:
    sweep = Sweeper.sweep

    def eager(self: Sweeper) -> None:
        sweep(self)
        for request_id in self.carried:
            request = self._queues.get(request_id)
            if request is not None and request.state is State.INFLIGHT:
                self._endings._pool.release(request.blocks)
                request.blocks = []

    patch.setattr(Sweeper, "sweep", eager)


def blocks_of_a_step_ahead_are_released_at_once(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BlockPool, "linger", lambda self, blocks: None)
    patch.setattr(BlockPool, "settle", lambda self, blocks: None)
    # Otherwise the rows that would read them are never run.
    patch.setattr(Row, "dropped", property(lambda row: False, lambda row, value: None))


def steps_ahead_are_run_for_the_gone(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Row, "dropped", property(lambda row: False, lambda row, value: None))


def the_gone_are_launched_ahead(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Request, "leaving", property(lambda request: False, lambda request, value: None))


def ends_forget_the_step_ahead(patch: pytest.MonkeyPatch) -> None:
    linger = endings.Endings._linger

    def forget(self: endings.Endings, request: Request) -> None:
        linger(self, request)
        self._pool.settle(request.lingering)
        request.lingering = []

    patch.setattr(endings.Endings, "_linger", forget)


def blocks_of_a_cancelled_load_are_released_at_once(patch: pytest.MonkeyPatch) -> None:
    keep = loading.Loading._keep

    def keep_if_wanted(self: loading.Loading, load: loading.Load, failed: dict[int, str]) -> None:
        if load.request is not None:
            keep(self, load, failed)

    patch.setattr(BlockPool, "park", BlockPool.release)
    patch.setattr(loading.Loading, "_keep", keep_if_wanted)


def slots_are_found_before_their_copy_has_landed(patch: pytest.MonkeyPatch) -> None:
    reserve = Level.reserve

    def ready_at_once(self: Level, content: loading.CachedBlock) -> int | None:
        slot = reserve(self, content)
        if slot is not None:
            self._ready[slot] = None
        return slot

    patch.setattr(Level, "reserve", ready_at_once)


def digests_are_trusted(patch: pytest.MonkeyPatch) -> None:
    """Collisions everywhere, and no comparison of the tokens."""

    def match(self: BlockPool, token_ids: list[int], digests: object, root: bytes) -> list[int]:
        block = self._by_digest.get(b"same")
        if block is None or len(token_ids) <= self.block_size:
            return []
        self._acquire(block)
        return [block]

    patch.setattr(prefix, "block_digest", lambda parent, token_ids: b"same")
    patch.setattr(BlockPool, "match", match)


def preempted_go_to_the_back(patch: pytest.MonkeyPatch) -> None:
    preempt = Admission._preempt

    def to_the_back(self: Admission, request: Request) -> None:
        preempt(self, request)
        self._queues.put(request, State.DEFERRED)

    patch.setattr(Admission, "_preempt", to_the_back)


def failed_blocks_stay_in_the_cache(patch: pytest.MonkeyPatch) -> None:
    """Committed before they are known to be good, and not discarded when they are not."""
    land = Steps._land_prefill

    def eager(self: Steps, request: Request, row: Row, result: StepResult, *rest: object) -> None:
        if request.id in result.errors:
            effects.advance(request, row, self._pool)
        land(self, request, row, result, *rest)  # type: ignore[arg-type]

    patch.setattr(Steps, "_land_prefill", eager)
    patch.setattr(BlockPool, "discard", BlockPool.release)


def whole_prompt_may_be_cached(patch: pytest.MonkeyPatch) -> None:
    match = BlockPool.match

    def whole(self: BlockPool, ids: list[int], digests: list[bytes], root: bytes) -> list[int]:
        longer = list(digests)
        extend_digests(longer, root, ids, self.block_size, len(ids) // self.block_size)
        return match(self, [*ids, 0], longer, root)

    patch.setattr(BlockPool, "match", whole)


def salts_are_ignored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(arrivals, "root_digest", lambda salt, adapter: root_digest("", adapter))


def adapters_are_not_in_the_hash(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(arrivals, "root_digest", lambda salt, adapter: root_digest(salt))


def chunk_cursor_survives_preemption(patch: pytest.MonkeyPatch) -> None:
    preempt, take = Admission._preempt, admission.take
    cursors: dict[RequestId, int] = {}

    def keep(self: Admission, request: Request) -> None:
        cursors[request.id] = request.num_computed
        preempt(self, request)

    def take_up(request: Request, blocks: list[int], num_computed: int, pool: BlockPool) -> None:
        take(request, blocks, max(num_computed, cursors.pop(request.id, 0)), pool)

    patch.setattr(Admission, "_preempt", keep)
    patch.setattr(admission, "take", take_up)


def some_cancels_are_lost(patch: pytest.MonkeyPatch) -> None:
    cancel = Scheduler.cancel

    def lossy(self: Scheduler, request_id: str) -> None:
        request = self._queues.get(request_id)  # type: ignore[arg-type]
        if request is None or request.state is not State.ACTIVE or request.num_output_tokens != 2:
            cancel(self, request_id)

    patch.setattr(Scheduler, "cancel", lossy)


def every_end_is_told_twice(patch: pytest.MonkeyPatch) -> None:
    send = Scheduler._send
    patch.setattr(Scheduler, "_send", lambda self, events: send(self, [*events, events[-1]]))


MUTATIONS: list[Mutation] = [
    sweep_rereads_who_is_cancelled,
    load_is_published_before_the_sweep,
    swept_blocks_are_not_released,
    blocks_in_flight_are_released_at_once,
    blocks_of_a_step_ahead_are_released_at_once,
    steps_ahead_are_run_for_the_gone,
    the_gone_are_launched_ahead,
    ends_forget_the_step_ahead,
    blocks_of_a_cancelled_load_are_released_at_once,
    slots_are_found_before_their_copy_has_landed,
    digests_are_trusted,
    preempted_go_to_the_back,
    failed_blocks_stay_in_the_cache,
    whole_prompt_may_be_cached,
    salts_are_ignored,
    adapters_are_not_in_the_hash,
    chunk_cursor_survives_preemption,
    some_cancels_are_lost,
    every_end_is_told_twice,
]


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("mutation", MUTATIONS)
def test_machine_finds_a_planted_bug(mutation: Mutation, monkeypatch: pytest.MonkeyPatch) -> None:
    mutation(monkeypatch)
    with pytest.raises((AssertionError, RuntimeError, ValueError, LookupError)):
        live()


@pytest.mark.usefixtures("quiet")
def test_machine_finds_nothing_without_one() -> None:
    live()


def live() -> None:
    for seed in range(NUM_LIVES):
        random_life(seed)
    for seed in range(NUM_TIER_LIVES):
        tier_life(seed)
