"""What random lives hardly reach: cancels, controls, deadlines and stops at the worst moments."""

from __future__ import annotations

from concurrent.futures import Future
from typing import TYPE_CHECKING

import pytest

from qwen3_asgi.errors import EngineDead, GenerationCancelled, GenerationTimeout, InvalidRequest
from qwen3_asgi.scheduler.control import Control
from qwen3_asgi.scheduler.request import State
from tests.scheduler.harness import Harness, prompt_of
from tests.scheduler.test_states import OLD, everywhere, spill

if TYPE_CHECKING:
    from qwen3_asgi.scheduler.executor import ModelExecutor
    from qwen3_asgi.scheduler.plan import RequestId


# ---- cancels ----


@pytest.mark.parametrize("steps", range(5))
@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
def test_cancels_between_collect_and_drop_find_forks_in_every_state(
    steps: int, overlap: bool
) -> None:
    """While the parent is dropped its forks and a stranger are cancelled, all of them twice."""
    harness = Harness(max_prefill_tokens=8, overlap=overlap)
    parent = harness.submit("0", prompt_of("same", 22), max_tokens=9)
    for name in ("1", "2"):
        harness.submit(name, prompt_of("same", 22), max_tokens=9, fork_of=parent)
    for name in ("stranger", "other"):
        harness.submit(name, 5, max_tokens=9)

    def on_drop(request_id: RequestId) -> None:
        harness.cancel("1", "2", "stranger", "stranger", request_id)

    harness.executor.on_drop = on_drop
    for _ in range(steps):
        harness.land()
        harness.step()
    harness.cancel("0")
    harness.run_all()
    assert all(harness.end(name).reason == "abort" for name in ("0", "1", "2"))
    assert harness.tokens("other") == harness.expected("other", 9)
    dropped = list(harness.executor.dropped)
    assert sorted(set(dropped)) == sorted(dropped)


def test_a_fork_that_was_on_its_way_when_its_parent_was_cancelled_is_cancelled_too() -> None:
    """Submitted after the drain, cancelled before the sweep: the parent's end comes first."""

    def between(phase: str) -> None:
        if phase == "sweep" and not forked:
            forked.append(
                harness.submit("1", prompt_of("same", 6), max_tokens=50, fork_of=parent).id
            )
            harness.cancel("0")

    forked: list[str] = []
    harness = Harness(trace=between)
    parent = harness.submit("0", prompt_of("same", 6), max_tokens=50)
    harness.step()
    assert (harness.end("0").reason, harness.ends("1")) == ("abort", [])
    harness.step()
    assert harness.end("1").reason == "abort"
    assert harness.num_rows("1") == 0
    harness.run_all()


def test_a_fork_whose_parent_has_ended_by_itself_is_served() -> None:
    harness = Harness()
    parent = harness.submit("0", prompt_of("same", 6), max_tokens=1)
    harness.run_all()
    harness.submit("1", prompt_of("same", 6), max_tokens=3, fork_of=parent)
    harness.run_all()
    assert harness.tokens("1") == harness.expected("1", 3)


def test_a_storm_of_four_thousand_cancels_with_half_of_them_in_flight() -> None:
    """The deferred leave at once, those in flight after the one step that they were in."""
    count, survivors = 4096, ("first", "last")
    harness = Harness(
        num_kv_blocks=3 * count, max_batch=count // 2, max_prefill_tokens=4 * count, overlap=True
    )
    harness.submit("first", 3, max_tokens=4)
    names = [f"r{number}" for number in range(count)]
    for name in names:
        harness.submit(name, 3, max_tokens=50)
    harness.submit("last", 3, max_tokens=4)
    harness.scheduler.iterate()
    flying = harness.queue(State.INFLIGHT)
    assert len(flying) == count // 2
    rows = len(harness.executor.rows)
    harness.cancel(*names, *names)
    harness.scheduler.iterate()
    assert harness.queue(State.DEFERRED) == ["last"]
    assert harness.queue(State.INFLIGHT) == flying
    harness.lanes.land("prefill")
    harness.scheduler.iterate()
    load = harness.scheduler.load
    assert (load.num_running, load.num_waiting) == (2, 0)
    assert len(harness.executor.rows) == rows + len(flying), "one step for those in flight"
    harness.run_all()
    for name in survivors:
        assert harness.tokens(name) == harness.expected(name, 4)
    assert all(harness.end(name).reason == "abort" for name in names)


# ---- control commands ----


def test_a_command_does_not_come_between_a_request_and_its_forks() -> None:
    """Else one request would be answered by two versions of an adapter, or half of it refused."""
    harness = Harness(max_prefill_tokens=8)
    harness.load_adapter("x", 3)
    parent = harness.submit("0", prompt_of("same", 22), max_tokens=4, adapter="x")
    harness.step()
    done = harness.unload_adapter("x")
    harness.submit("1", prompt_of("same", 22), max_tokens=8, adapter="x", fork_of=parent)
    harness.submit("behind", 3, adapter="x")
    harness.step()
    assert harness.queue(State.POST_CONTROL_DEFERRED) == ["behind"]
    expected = harness.expected("1", 8)
    harness.run_all()
    assert harness.tokens("0") == expected[:4]
    assert harness.tokens("1") == expected
    assert done.result(0) is None
    assert isinstance(harness.end("behind").error, InvalidRequest)


def test_a_group_that_is_held_is_held_and_released_whole() -> None:
    harness = Harness()
    harness.load_adapter("x", 3)
    harness.submit("user", 3, max_tokens=6, adapter="x")
    harness.step()
    harness.load_adapter("x", 4)
    parent = harness.submit("0", prompt_of("same", 10), max_tokens=4, adapter="x")
    for name in ("1", "2"):
        harness.submit(name, prompt_of("same", 10), max_tokens=4, adapter="x", fork_of=parent)
    harness.step()
    assert harness.queue(State.POST_CONTROL_DEFERRED) == ["0", "1", "2"]
    harness.cancel("1")
    harness.run_all()
    assert harness.end("1").reason == "abort"
    for name in ("0", "2"):
        assert harness.tokens(name) == harness.expected(name, 4)


def test_a_refusal_by_one_command_makes_room_for_the_next_at_once() -> None:
    """Who is refused was all that the second command waited for; nothing else is live."""
    harness = Harness()
    harness.load_adapter("x", 3)
    harness.submit("user", 3, max_tokens=2, adapter="x")
    harness.step()
    harness.unload_adapter("x")
    harness.submit("refused", 3, adapter="x")
    loaded = harness.load_adapter("x", 4)
    harness.submit("behind", 3, max_tokens=4, adapter="x")
    harness.run_all()
    assert isinstance(harness.end("refused").error, InvalidRequest)
    assert loaded.result(0) is None
    assert harness.tokens("behind") == harness.expected("behind", 4)


@pytest.mark.usefixtures("quiet")
def test_a_command_that_kills_the_loop_leaves_nobody_waiting() -> None:
    harness = Harness()

    def die(executor: ModelExecutor, adapters: dict[str, str]) -> None:
        raise SystemExit(3)

    fatal: Future[None] = Future()
    before = harness.load_adapter("x", 1)
    harness.scheduler.control(Control(die, fatal))
    after = harness.load_adapter("y", 1)
    harness.submit("a", 3)
    with pytest.raises(SystemExit):
        harness.scheduler.run()
    assert before.result(0) is None
    with pytest.raises(SystemExit):
        fatal.result(0)
    with pytest.raises(EngineDead):
        after.result(0)
    assert isinstance(harness.end("a").error, EngineDead)
    harness.check_idle()


# ---- deadlines ----


def test_a_deadline_in_the_middle_of_a_load_parks_its_blocks() -> None:
    now = [0.0]
    harness = Harness(num_kv_blocks=24, host_slots=16, clock=lambda: now[0])
    spill(harness, "old")
    harness.submit("late", prompt_of("old", OLD), max_tokens=4, deadline=5.0)
    harness.step()
    request = harness.requests["late"]
    assert harness.queue(State.LOADING) == ["late"]
    assert request.load is not None
    blocks = set(request.load.blocks)
    now[0] = 5.0
    harness.step()
    assert isinstance(harness.end("late").error, GenerationTimeout)
    assert harness.tiers.num_running, "nobody waited for the copy"
    assert harness.scheduler.load.kv_used_blocks == 0
    harness.submit("next", 40, max_tokens=4)
    harness.step()
    assert not blocks & set(harness.requests["next"].blocks)
    harness.run_all()
    harness.submit("again", prompt_of("old", OLD), max_tokens=4)
    harness.run_all()
    assert harness.end("again").cached_tokens == OLD - 4, "what was copied is of use to others"


def test_a_deadline_in_flight_waits_for_its_step_and_takes_the_forks_along() -> None:
    now = [0.0]
    harness = Harness(overlap=True, clock=lambda: now[0], max_prefill_tokens=8)
    parent = harness.submit("0", prompt_of("same", 22), max_tokens=9, deadline=5.0)
    harness.submit("1", prompt_of("same", 22), max_tokens=9, fork_of=parent)
    harness.step()
    assert harness.queue(State.INFLIGHT) == ["0"]
    now[0] = 5.0
    harness.step()
    assert harness.ends("0") == []
    assert isinstance(harness.end("1").error, GenerationTimeout)
    harness.land()
    harness.step()
    assert isinstance(harness.end("0").error, GenerationTimeout)
    assert harness.num_rows("0") == 1
    harness.run_all()


# ---- stop ----


@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
def test_stop_ends_every_state_once_and_answers_every_command(overlap: bool) -> None:
    harness = everywhere()
    if overlap:
        harness = Harness(overlap=True, num_kv_blocks=24, host_slots=16, max_prefill_tokens=8)
        harness.load_adapter("x", 7)
        harness.submit("active", 3, max_tokens=20, adapter="x")
        harness.step()
        harness.land()
        harness.submit("prefilling", 30)
        harness.step()
        assert harness.queue(State.INFLIGHT) == ["active", "prefilling"]
    pending = harness.unload_adapter("x")
    finished = {name for name in harness.requests if harness.ends(name)}
    harness.submit("behind", 3, adapter="x")
    harness.scheduler.stop()
    late = harness.unload_adapter("x")  # in the inbox behind the stop
    harness.scheduler.run()
    for name in harness.requests:
        end = harness.end(name)
        assert name in finished or isinstance(end.error, GenerationCancelled), name
    for command in (pending, late):
        with pytest.raises(EngineDead):
            command.result(0)
    harness.check_idle()
    with pytest.raises(EngineDead):
        harness.scheduler.submit(harness.requests["behind"])


# ---- ids, priorities ----


def test_an_id_in_use_is_refused_and_its_owner_goes_on() -> None:
    harness = Harness()
    first = harness.submit("a", 3, max_tokens=4)
    harness.step()
    harness.submit("a", 5, max_tokens=4)
    harness.step()
    refused, *_ = harness.ends("a")
    assert isinstance(refused.error, InvalidRequest)
    assert refused.error.param == "request_id"
    harness.requests["a"] = first
    for _ in range(6):
        harness.step()
    assert harness.tokens("a") == harness.expected("a", 4)
    assert [end.reason for end in harness.ends("a")] == ["error", "length"]
    assert harness.scheduler.load.kv_used_blocks == 0


def test_blocks_are_taken_from_the_least_urgent_whoever_came_first() -> None:
    harness = Harness(num_kv_blocks=8, max_batch=4)
    harness.submit("patient", 7, max_tokens=12, priority=5)
    harness.step()
    harness.submit("urgent", 7, max_tokens=16, priority=-5)
    harness.run_all()
    assert set(harness.record.preempted) == {"patient"}
    assert harness.tokens("patient") == harness.expected("patient", 12)
    assert harness.tokens("urgent") == harness.expected("urgent", 16)


def test_priority_is_strict_so_a_long_prompt_waits_while_the_urgent_keep_coming() -> None:
    """It is not starved by its equals, which may not overtake it, but by whoever is more urgent."""
    harness = Harness(num_kv_blocks=16, max_batch=4)
    harness.submit("running", 20, max_tokens=40)
    harness.step()
    harness.submit("long", 50, max_tokens=2)
    harness.submit("equal", 3, max_tokens=1)
    for number in range(10):
        harness.submit(f"urgent {number}", 3, max_tokens=1, priority=-1)
        harness.step(2)
        assert harness.end(f"urgent {number}").reason == "length"
        assert harness.queue(State.DEFERRED) == ["long", "equal"]
    harness.run_all()
    ends = [event.request_id for event in harness.record.events if event.finish]
    assert ends.index("equal") > ends.index("running")
    assert harness.tokens("long") == harness.expected("long", 2)
