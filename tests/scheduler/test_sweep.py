"""What a cancel does: the request leaves at the top of the next iteration, nothing else does."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import pytest

from qwen3_asgi.scheduler.inbox import Cancelled, Wake
from qwen3_asgi.scheduler.plan import RequestId
from qwen3_asgi.scheduler.queues import QueueTable
from qwen3_asgi.scheduler.request import Request, State
from qwen3_asgi.scheduler.sweep import collect
from tests.scheduler.harness import (
    DEFERRED,
    EVERYONE,
    LENGTHS,
    Harness,
    busy,
    prompt_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from qwen3_asgi.scheduler.plan import StepPlan


@pytest.mark.parametrize("victim", EVERYONE)
def test_cancelled_request_is_dropped_in_the_next_iteration(victim: str) -> None:
    harness = busy()
    rows, request = harness.num_rows(victim), harness.requests[victim]
    harness.cancel(victim)
    harness.step()
    assert harness.num_rows(victim) == rows, "it was forwarded after its cancel"
    assert harness.end(victim).reason == "abort"
    assert victim not in harness.order()
    assert request.blocks == []
    assert request.num_computed == 0, "the chunk cursor was kept"
    harness.run()
    assert harness.num_rows(victim) == rows


@pytest.mark.parametrize("victim", EVERYONE)
def test_executor_forgets_exactly_the_cancelled_that_were_admitted(victim: str) -> None:
    harness = busy()
    harness.cancel(victim)
    harness.step()
    assert harness.executor.dropped == ([] if victim in DEFERRED else [victim])
    harness.run()
    never_admitted = {victim} & set(DEFERRED)
    assert Counter(harness.executor.dropped) == Counter(set(EVERYONE) - never_admitted)


@pytest.mark.parametrize("victim", EVERYONE)
def test_sweep_says_which_queue_it_swept(victim: str) -> None:
    harness = busy()
    state = harness.requests[victim].state
    harness.cancel(victim)
    harness.step()
    assert harness.record.swept_from == {victim: state}
    assert [entry for entry in harness.record.log if entry[0] == "sweep"] == [("sweep", 1)]


@pytest.mark.parametrize(
    "victims", [[name] for name in EVERYONE] + [["a", "d"], ["p", "d"], ["a", "b", "p"], ["e", "b"]]
)
def test_survivors_keep_their_place_and_their_tokens(victims: list[str]) -> None:
    undisturbed, harness = busy(), busy()
    undisturbed.run()
    survivors = [name for name in EVERYONE if name not in victims]
    harness.cancel(*victims)
    harness.scheduler._drain()
    harness.scheduler._sweeper.sweep()
    assert harness.order() == survivors
    harness.run()
    for name in survivors:
        assert harness.tokens(name) == undisturbed.tokens(name)
        assert harness.tokens(name) == harness.expected(name, LENGTHS[name])
        assert harness.end(name).reason == "length"


def test_every_block_is_back_after_everyone_was_cancelled() -> None:
    harness = busy()
    harness.cancel(*EVERYONE)
    harness.step()
    harness.check_idle()
    load = harness.scheduler.load
    assert load.idle
    assert load.kv_used_blocks == 0
    assert load.kv_usage == 0.0


def test_phases_come_in_the_order_of_the_design() -> None:
    harness = busy()
    harness.record.log.clear()
    harness.cancel("a")
    harness.step(3)
    phases = [what for kind, what in harness.record.log if kind == "phase"]
    order = ["drain", "sweep", "publish", "admit", "plan", "execute", "resolve", "deliver"]
    assert phases == order * 3


def test_each_deed_happens_in_its_phase() -> None:
    harness = busy()
    harness.cancel("p")
    harness.record.log.clear()
    harness.step()
    deeds: dict[object, list[str]] = {}
    phase: object = None
    for kind, what in harness.record.log:
        if kind == "phase":
            phase = what
        else:
            deeds.setdefault(phase, []).append(kind)
    assert deeds == {
        "sweep": ["cancel", "finish", "sweep"],
        "publish": ["load", "deliver"],
        "admit": ["admit", "admit"],
        "plan": ["load"],
        "execute": ["step"],
        "resolve": ["tokens", "load"],
        "deliver": ["deliver"],
    }


def test_snapshot_without_the_cancelled_is_published_before_their_end_is_told() -> None:
    harness = busy()
    harness.record.log.clear()
    harness.cancel(*EVERYONE)
    harness.step()
    kinds = [kind for kind, _ in harness.record.log]
    assert kinds.index("load") < kinds.index("deliver")
    (load,) = [what for kind, what in harness.record.log if kind == "load"]
    assert load == harness.scheduler.load
    assert harness.scheduler.load.idle


def test_snapshot_is_published_before_parking(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = busy()
    parked_with: list[bool] = []

    def wait_command() -> Wake:
        parked_with.append(harness.scheduler.load.idle and harness.record.loads[-1].idle)
        return Wake()

    monkeypatch.setattr(harness.scheduler._inbox, "wait_command", wait_command)
    harness.cancel(*EVERYONE)
    harness.scheduler.iterate(park=True)
    assert parked_with == [True]


def test_request_cancelled_between_collecting_and_dropping_stays_whole_until_the_next_sweep() -> (
    None
):
    harness = busy()
    seen: list[list[int]] = []

    def cancel_another(dropped: RequestId) -> None:
        if dropped == "a":
            harness.cancel("b", "p", "d")
        seen.append(list(harness.requests["b"].blocks))

    harness.executor.on_drop = cancel_another
    held = list(harness.requests["b"].blocks)
    harness.cancel("a")
    harness.step()
    assert seen[0] == held, "a request that was not collected lost its blocks"
    assert harness.ends("b") == harness.ends("p") == harness.ends("d") == []
    assert harness.order() == ["b", "p", "d", "e"]
    harness.step()
    assert harness.order() == ["e"]
    assert [harness.end(name).reason for name in "bpd"] == ["abort"] * 3
    assert harness.requests["b"].blocks == []
    harness.run()
    assert Counter(harness.executor.dropped) == Counter("abpe")


def test_request_cancelled_during_its_step_is_swept_right_after_it() -> None:
    harness = busy()

    def cancel_once(plan: StepPlan) -> None:
        harness.executor.before_step = None
        harness.cancel("a", "p")

    harness.executor.before_step = cancel_once
    harness.step()
    rows = harness.num_rows("a"), harness.num_rows("p")
    assert harness.ends("a") == harness.ends("p") == []
    harness.step()
    assert (harness.num_rows("a"), harness.num_rows("p")) == rows
    assert harness.record.wasted == {"a": 1, "p": 8}, "exactly that step's tokens"
    harness.run()


def test_nothing_is_wasted_on_requests_cancelled_between_steps() -> None:
    harness = busy()
    harness.cancel(*EVERYONE)
    harness.step()
    assert harness.record.wasted == dict.fromkeys(EVERYONE, 0)


def test_only_the_first_cancel_counts_the_waste() -> None:
    harness = busy()
    harness.executor.before_step = lambda plan: harness.cancel("a")
    harness.step()
    harness.cancel("a")
    harness.step()
    assert harness.record.wasted == {"a": 1}


class CountingTable(QueueTable):
    """Counts what is looked at, and refuses to be walked through."""

    def __init__(self) -> None:
        super().__init__()
        self.lookups = 0

    def get(self, request_id: RequestId) -> Request | None:
        self.lookups += 1
        return super().get(request_id)

    def __iter__(self) -> Iterator[Request]:
        raise AssertionError("the sweep walks through the live requests")

    def __len__(self) -> int:
        raise AssertionError("the sweep counts the live requests")


@pytest.mark.parametrize("num_live", [10, 1000])
def test_sweep_looks_at_the_cancelled_only(num_live: int) -> None:
    table = CountingTable()
    for i in range(num_live):
        table.put(Request(f"r{i}", [1]), State.DEFERRED)
    arrived = [Cancelled(RequestId(f"r{i}"), 0) for i in range(0, 10, 2)]
    sweep = collect(arrived * 3, {}, table)
    assert [request.id for request, _ in sweep.due] == [entry.request_id for entry in arrived]
    assert table.lookups == len(arrived)


def test_sweep_of_nothing_looks_at_nothing() -> None:
    table = CountingTable()
    table.put(Request("r", [1]), State.DEFERRED)
    sweep = collect([], {}, table)
    assert (sweep.due, sweep.carried, table.lookups) == ((), {}, 0)


def test_request_in_flight_is_carried_until_its_step_has_landed() -> None:
    table = QueueTable()
    request = Request("r", [1])
    table.put(request, State.INFLIGHT)
    first = Cancelled(request.id, 7)
    sweep = collect([first], {}, table)
    for _ in range(3):
        assert sweep.due == ()
        sweep = collect([Cancelled(request.id, 9)], sweep.carried, table)
    table.put(request, State.ACTIVE)
    assert collect([], sweep.carried, table).due == ((request, first),)


def test_idle_sweep_does_not_even_read_the_clock() -> None:
    reads: list[None] = []

    def clock() -> float:
        reads.append(None)
        return 0.0

    harness = Harness(clock=clock)
    harness.submit("r", prompt_of("r", 3))
    harness.step()
    del reads[:]
    harness.scheduler._sweeper.sweep()
    assert reads == []
