"""Pipelined decode: a decode step is launched before the tokens of the one before it are known."""

from __future__ import annotations

import threading

import pytest

from qwen3_asgi.scheduler.lanes import ThreadLanes
from qwen3_asgi.scheduler.plan import PENDING, Row, SampleSpec, Sampling, StepPlan, StepResult
from qwen3_asgi.scheduler.request import State
from qwen3_asgi.testing import FakeExecutor
from tests.scheduler.harness import Harness

GUARD_SECONDS = 20.0
EOS = 0


def decoding(*names: str, max_tokens: int = 20, **settings: int) -> Harness:
    """These have their first token, and two decode steps are on the lane."""
    harness = Harness(pipelined=True, **settings)
    for name in names:
        harness.submit(name, 3, max_tokens=max_tokens, eos_token_ids=[EOS])
    harness.step()
    harness.land()
    harness.step(2)
    return harness


def launched(harness: Harness) -> list[StepPlan]:
    return list(harness.lanes.running["decode"])


def test_the_next_step_is_launched_before_the_tokens_of_the_last_are_known() -> None:
    harness = decoding("a", "b")
    running, ahead = launched(harness)
    assert [row.request_id for row in ahead.rows] == ["a", "b"]
    assert [row.token_ids for row in ahead.rows] == [[PENDING], [PENDING]]
    assert [row.start for row in ahead.rows] == [row.start + 1 for row in running.rows]
    assert ahead.behind == running.step
    assert len(harness.tokens("a")) == 1, "only the prefill's"
    harness.step(3)
    assert len(launched(harness)) == 2, "never more than two"
    harness.run_all()
    for name in ("a", "b"):
        assert harness.tokens(name) == harness.expected(name, 20)
    assert all(row.token_ids != (PENDING,) for row in harness.executor.rows)


def test_nobody_is_launched_ahead_beyond_max_tokens() -> None:
    harness = decoding("a", "b", max_tokens=2)
    assert len(launched(harness)) == 1
    harness.run_all()
    assert harness.num_rows("a") == 2


def test_who_has_just_been_prefilled_joins_the_next_step_that_is_launched() -> None:
    harness = decoding("a")
    harness.submit("late", 3, max_tokens=20)
    harness.step()
    harness.lanes.land("prefill")
    harness.step()
    harness.lanes.land("decode")
    harness.step()
    assert [row.request_id for row in launched(harness)[1].rows] == ["a", "late"]
    harness.run_all()
    for name in ("a", "late"):
        assert harness.tokens(name) == harness.expected(name, 20)


def test_an_end_is_told_at_once_and_its_blocks_wait_for_the_step_ahead() -> None:
    harness = decoding("a")
    harness.executor.eos_after["a"] = 1
    blocks = set(harness.requests["a"].blocks)
    harness.land()
    harness.step()
    assert harness.end("a").reason == "stop"
    load = harness.scheduler.load
    assert (load.num_running, load.kv_used_blocks) == (0, 0)
    assert harness.executor.dropped == [], "a step that carries it is still running"
    harness.submit("greedy", 64 * 4 - 12, max_tokens=4)
    harness.step(3)
    assert blocks.isdisjoint(harness.requests["greedy"].blocks)
    harness.run_all()
    assert harness.executor.dropped == ["a", "greedy"]
    assert harness.num_rows("a") == 2, "the row that was launched ahead was not run"


def test_a_block_is_shared_but_not_given_away_while_a_step_ahead_reads_it() -> None:
    harness = Harness(pipelined=True, num_kv_blocks=10)
    prompt = list(range(1, 10))
    harness.submit("a", prompt, max_tokens=20, eos_token_ids=[EOS])
    harness.step()
    harness.land()
    harness.step(2)
    blocks = list(harness.requests["a"].blocks)
    harness.executor.eos_after["a"] = 1
    harness.land()
    harness.step()
    assert harness.end("a").reason == "stop"
    harness.submit("same", prompt, max_tokens=3)
    harness.step()
    assert harness.requests["same"].blocks[:2] == blocks[:2], "full blocks can be read by both"
    harness.lanes.land("prefill")
    harness.step()
    harness.cancel("same")
    harness.step()
    harness.submit("greedy", 30, max_tokens=2)
    harness.step(3)
    assert set(blocks).isdisjoint(harness.requests["greedy"].blocks)
    harness.run_all()
    assert harness.tokens("greedy") == harness.expected("greedy", 2)


def test_a_cancel_in_flight_costs_the_step_that_runs_and_no_other() -> None:
    harness = decoding("a", "b")
    harness.cancel("a")
    harness.step(3)
    assert harness.queue(State.INFLIGHT) == ["a", "b"], "its step is still running"
    rows = harness.num_rows("a")
    harness.land()
    harness.step()
    assert harness.end("a").reason == "abort"
    assert harness.scheduler.load.num_running == 1
    assert [row.request_id for row in launched(harness)[1].rows] == ["b"]
    harness.run_all()
    assert harness.num_rows("a") == rows + 1
    assert harness.tokens("b") == harness.expected("b", 20)


def test_a_cancel_with_both_steps_landed_at_once_is_no_failure() -> None:
    harness = decoding("a", "b")
    harness.cancel("a")
    harness.step()
    harness.lanes.land("decode")
    harness.lanes.land("decode")
    harness.step()
    assert harness.end("a").reason == "abort"
    harness.run_all()
    assert harness.tokens("b") == harness.expected("b", 20)


def test_a_failed_step_takes_its_requests_with_it_and_nobody_else_of_the_step_ahead() -> None:
    harness = decoding("a")
    harness.submit("late", 3, max_tokens=20)
    harness.step()
    harness.lanes.land("prefill")
    harness.lanes.land("decode")
    harness.step(2)
    steps = launched(harness)
    assert [row.request_id for row in steps[-1].rows] == ["a", "late"]
    failing = steps[0].step

    def fail(plan: StepPlan) -> None:
        if plan.step == failing:
            raise ValueError("a bad step")

    harness.executor.before_step = fail
    harness.lanes.land("decode")
    harness.lanes.land("decode")  # behind it, before anybody has heard of the failure
    harness.step()
    assert harness.end("a").reason == "error"
    harness.run_all()
    assert harness.tokens("late") == harness.expected("late", 20)
    assert harness.executor.dropped == ["a", "late"]


def test_an_adapter_is_unloaded_after_the_step_ahead() -> None:
    harness = Harness(pipelined=True)
    harness.load_adapter("x", 7)
    harness.step()
    harness.submit("a", 3, max_tokens=20, adapter="x", eos_token_ids=[EOS])
    harness.step()
    harness.land()
    harness.step(2)
    harness.executor.eos_after["a"] = 1
    done = harness.unload_adapter("x")
    harness.land()
    harness.step()
    assert harness.end("a").reason == "stop"
    assert not done.done(), "the step ahead needs it"
    harness.land()
    harness.step()
    assert done.done()
    assert harness.executor.adapters == {}


def test_stop_tokens_stay_banned_until_min_tokens_in_a_step_ahead() -> None:
    harness = Harness(pipelined=True)
    harness.executor.eos_after["a"] = 0
    harness.submit("a", 3, max_tokens=20, min_tokens=5, eos_token_ids=[EOS])
    harness.run_all()
    assert len(harness.tokens("a")) == 6
    assert harness.end("a").reason == "stop"


def test_a_pool_too_small_for_everybody_still_serves_everybody() -> None:
    harness = Harness(pipelined=True, num_kv_blocks=8)
    names = ["a", "b", "c", "d"]
    for name in names:
        harness.submit(name, 6, max_tokens=12)
    harness.run_all()
    for name in names:
        assert harness.tokens(name) == harness.expected(name, 12)
    assert sum(request.num_preemptions for request in harness.requests.values())


# ---- steps that are still running when the executor returns them ----


class Device(FakeExecutor):
    """Steps run when they are told to, in order; `step` returns at once."""

    def __init__(self) -> None:
        super().__init__()
        self.begun: list[int] = []
        self.may_end = threading.Semaphore(0)
        self.begun_two = threading.Event()

    def step(self, plan: StepPlan) -> Running:
        self.begun.append(plan.step)
        if len(self.begun) == 2:
            self.begun_two.set()
        return Running(self, plan)


class Running:
    def __init__(self, device: Device, plan: StepPlan) -> None:
        self._device = device
        self._plan = plan

    def result(self) -> StepResult:
        assert self._device.may_end.acquire(timeout=GUARD_SECONDS)
        return self._device.run(self._plan)


def plan_of(step: int, token: int, start: int) -> StepPlan:
    row = Row("a", "decode", [token], start, [0, 1, 2], SampleSpec(Sampling(), start))  # type: ignore[arg-type]
    return StepPlan(step, (row,), step - 1)


def test_a_lane_begins_the_next_step_while_the_last_one_runs() -> None:
    device = Device()
    told = threading.Semaphore(0)
    lanes = ThreadLanes(device, told.release)
    lanes.launch("decode", plan_of(1, 5, 0))
    lanes.launch("decode", plan_of(2, PENDING, 1))
    assert device.begun_two.wait(GUARD_SECONDS), "the second waits for the first to end"
    assert lanes.landed() == []
    device.may_end.release(2)
    for _ in range(2):
        assert told.acquire(timeout=GUARD_SECONDS)
    first, second = lanes.landed()
    assert [first.plan.step, second.plan.step] == [1, 2]
    assert isinstance(first.result, StepResult)
    assert isinstance(second.result, StepResult)
    assert device.rows[1].token_ids == (first.result.tokens["a"].token_id,)  # type: ignore[index]
    assert lanes.close() == []
    assert not [t for t in threading.enumerate() if t.name.endswith(" lane")]


@pytest.mark.parametrize("error", [ValueError("a bad row"), SystemExit(3)])
def test_whatever_a_running_step_raises_lands(error: BaseException) -> None:
    device = Device()
    told = threading.Semaphore(0)
    lanes = ThreadLanes(device, told.release)

    def fail(plan: StepPlan) -> None:
        if plan.step == 1:
            raise error

    device.before_step = fail
    device.may_end.release(2)
    for step in (1, 2):
        lanes.launch("decode", plan_of(step, 5, 0))
        assert told.acquire(timeout=GUARD_SECONDS), "the lane died without a word"
    failed, whole = lanes.landed()
    assert failed.result is error
    assert isinstance(whole.result, StepResult)
    assert lanes.close() == []
