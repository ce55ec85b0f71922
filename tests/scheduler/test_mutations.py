"""The machine of the invariants is worth something: it finds each of these planted bugs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from qwen3_asgi.scheduler import admission, blocks, effects, loop
from qwen3_asgi.scheduler.blocks import BlockPool
from qwen3_asgi.scheduler.effects import finish
from qwen3_asgi.scheduler.events import Event
from qwen3_asgi.scheduler.loop import Scheduler
from qwen3_asgi.scheduler.prefix import root_digest
from qwen3_asgi.scheduler.request import State
from qwen3_asgi.scheduler.sweep import collect
from tests.scheduler.machine import random_life

if TYPE_CHECKING:
    from qwen3_asgi.scheduler.plan import Row
    from qwen3_asgi.scheduler.queues import QueueTable
    from qwen3_asgi.scheduler.request import Request

Mutation = Callable[[pytest.MonkeyPatch], None]
NUM_LIVES = 300


def sweep_rereads_who_is_cancelled(patch: pytest.MonkeyPatch) -> None:
    """Release by one reading of the cancels, leave the queues by another."""

    def sweep(self: Scheduler) -> None:
        due = collect(self._inbox.take_cancelled(), self._carried_cancels, self._queues).due
        for request, _ in due:
            if request.admitted:
                self._executor.drop_request(request.id)
            admission.give_back(request, self._pool)
            self._events.append(Event(request.id, None, finish(request, "abort")))
        reread = collect(self._inbox.take_cancelled(), {}, self._queues).due
        for request, _ in {request.id: (request, _) for request, _ in due + reread}.values():
            self._queues.remove(request)

    patch.setattr(Scheduler, "_sweep", sweep)


def load_is_published_before_the_sweep(patch: pytest.MonkeyPatch) -> None:
    sweep, publish = Scheduler._sweep, Scheduler._publish
    moved: list[Scheduler] = []

    def publish_then_sweep(self: Scheduler) -> None:
        publish(self)
        sweep(self)
        moved.append(self)

    def publish_unless_moved(self: Scheduler) -> None:
        if moved:
            moved.clear()
        else:
            publish(self)

    patch.setattr(Scheduler, "_sweep", publish_then_sweep)
    patch.setattr(Scheduler, "_publish", publish_unless_moved)


def swept_blocks_are_not_released(patch: pytest.MonkeyPatch) -> None:
    def forget(request: Request, pool: BlockPool) -> None:
        request.blocks = []

    patch.setattr(loop, "give_back", forget)


def digests_are_trusted(patch: pytest.MonkeyPatch) -> None:
    """Collisions everywhere, and no comparison of the tokens."""

    def match(self: BlockPool, token_ids: list[int], salt: str) -> tuple[list[int], list[bytes]]:
        found: list[int] = []
        for _ in range((len(token_ids) - 1) // self.block_size):
            block = self._by_digest.get(b"same")
            if block is None or found:
                break
            self._acquire(block)
            found.append(block)
        return found, [b"same"] * len(found)

    patch.setattr(blocks, "block_digest", lambda parent, token_ids: b"same")
    patch.setattr(BlockPool, "match", match)


def preempted_go_to_the_back(patch: pytest.MonkeyPatch) -> None:
    def preempt(request: Request, queues: QueueTable, pool: BlockPool) -> None:
        admission.give_back(request, pool)
        queues.put(request, State.DEFERRED)

    patch.setattr(admission, "preempt", preempt)


def failed_blocks_stay_in_the_cache(patch: pytest.MonkeyPatch) -> None:
    """Committed before they are known to be good, and not discarded when they are not."""
    resolve_row = Scheduler._resolve_row

    def eager(self: Scheduler, request: Request, row: Row, *rest: object) -> None:
        if request.id in rest[0].errors:  # type: ignore[attr-defined]
            effects.advance(request, row, self._pool)
        resolve_row(self, request, row, *rest)  # type: ignore[arg-type]

    patch.setattr(Scheduler, "_resolve_row", eager)
    patch.setattr(BlockPool, "discard", BlockPool.release)


def whole_prompt_may_be_cached(patch: pytest.MonkeyPatch) -> None:
    match = BlockPool.match
    patch.setattr(BlockPool, "match", lambda self, ids, salt: match(self, [*ids, 0], salt))


def salts_are_ignored(patch: pytest.MonkeyPatch) -> None:
    for module in (blocks, effects):
        patch.setattr(module, "root_digest", lambda salt: root_digest(""))


def chunk_cursor_survives_preemption(patch: pytest.MonkeyPatch) -> None:
    def preempt(request: Request, queues: QueueTable, pool: BlockPool) -> None:
        cursor = request.num_computed
        admission.give_back(request, pool)
        request.num_computed = cursor
        queues.put(request, State.DEFERRED, front=True)

    reserve = admission._reserve_prompt

    def keep_cursor(request: Request, num_running: int, pool: BlockPool) -> bool:
        cursor = request.num_computed
        reserved = reserve(request, num_running, pool)
        request.num_computed = max(cursor, request.num_computed)
        return reserved

    patch.setattr(admission, "preempt", preempt)
    patch.setattr(admission, "_reserve_prompt", keep_cursor)


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
    digests_are_trusted,
    preempted_go_to_the_back,
    failed_blocks_stay_in_the_cache,
    whole_prompt_may_be_cached,
    salts_are_ignored,
    chunk_cursor_survives_preemption,
    some_cancels_are_lost,
    every_end_is_told_twice,
]


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("mutation", MUTATIONS)
def test_machine_finds_a_planted_bug(mutation: Mutation, monkeypatch: pytest.MonkeyPatch) -> None:
    mutation(monkeypatch)
    with pytest.raises((AssertionError, RuntimeError, ValueError, KeyError)):
        live()


@pytest.mark.usefixtures("quiet")
def test_machine_finds_nothing_without_one() -> None:
    live()


def live() -> None:
    for seed in range(NUM_LIVES):
        random_life(seed)
