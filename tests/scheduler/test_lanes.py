"""Steps on real threads: what lands is looked at, whatever raises, and nobody is left behind."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from qwen3_asgi.errors import EngineDead, GenerationCancelled
from qwen3_asgi.scheduler.inbox import Inbox
from qwen3_asgi.scheduler.lanes import LANES, ThreadLanes
from qwen3_asgi.scheduler.loop import Scheduler
from qwen3_asgi.scheduler.plan import StepPlan
from qwen3_asgi.scheduler.request import Request, State
from qwen3_asgi.testing import FakeExecutor, StepGate
from qwen3_asgi.testing.fake_executor import generate
from tests.scheduler.harness import Harness, Record, prompt_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from qwen3_asgi.scheduler.events import Event

GUARD_SECONDS = 20.0


class Counted(Record):
    """Counts the requests that have ended."""

    def __init__(self) -> None:
        super().__init__()
        self.ended = threading.Semaphore(0)

    def deliver(self, events: Sequence[Event]) -> None:
        super().deliver(events)
        for event in events:
            if event.finish is not None:
                self.ended.release()


class Threaded:
    """A scheduler with lanes of its own, running on a thread of its own."""

    def __init__(self, *, gate: StepGate | None = None, **settings: int) -> None:
        self.executor = FakeExecutor(num_kv_blocks=512, gate=gate)
        self.record = Counted()
        self.scheduler = Scheduler(
            self.executor,
            self.record,
            overlap=True,
            observer=self.record,
            **{"max_batch": 64, "max_prefill_tokens": 16, **settings},
        )
        self.requests: dict[str, Request] = {}
        self.raised: BaseException | None = None
        self.thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        try:
            self.scheduler.run()
        except BaseException as error:
            self.raised = error

    def submit(self, name: str, length: int = 3, *, max_tokens: int = 4) -> None:
        request = Request(name, prompt_of(name, length), max_tokens=max_tokens)
        self.requests[name] = request
        self.scheduler.submit(request)

    def join(self) -> None:
        self.thread.join(GUARD_SECONDS)
        assert not self.thread.is_alive(), "the scheduler hangs"

    def end(self, name: str) -> tuple[str, str]:
        (finish,) = [e.finish for e in self.record.events if e.request_id == name and e.finish]
        return finish.reason, type(finish.error).__name__

    def check_over(self) -> None:
        """One end each, everything given back, no thread left."""
        load = self.scheduler.load
        assert (load.num_running, load.num_waiting, load.kv_used_blocks) == (0, 0, 0)
        ends = sorted(e.request_id for e in self.record.events if e.finish)
        assert ends == sorted(self.requests)
        self.scheduler.check_integrity()
        lanes = {f"qwen3-asgi {lane} lane" for lane in LANES}
        assert lanes.isdisjoint(thread.name for thread in threading.enumerate())


@contextmanager
def threaded(gate: StepGate | None = None, **settings: int) -> Iterator[Threaded]:
    world = Threaded(gate=gate, **settings)
    world.thread.start()
    try:
        yield world
    finally:
        world.scheduler.stop()
        if gate is not None:
            gate.open()
        world.join()


def test_two_steps_run_at_once_and_the_scheduler_is_told_of_each() -> None:
    gate = StepGate(open=False, guard_seconds=GUARD_SECONDS)
    executor = FakeExecutor(gate=gate)
    told = threading.Semaphore(0)
    lanes = ThreadLanes(executor, told.release)
    for number, lane in enumerate(LANES):
        lanes.launch(lane, StepPlan(number, ()))
    gate.held_sync(2)
    assert lanes.landed() == []
    gate.open()
    for _ in LANES:
        assert told.acquire(timeout=GUARD_SECONDS)
    assert {landed.lane for landed in lanes.landed()} == set(LANES)
    assert lanes.close() == []


@pytest.mark.parametrize("error", [ValueError("a bad row"), SystemExit(3)])
def test_a_lane_survives_whatever_its_step_raises(error: BaseException) -> None:
    executor = FakeExecutor()
    told = threading.Semaphore(0)
    lanes = ThreadLanes(executor, told.release)

    def fail(plan: StepPlan) -> None:
        if plan.step == 0:
            raise error

    executor.before_step = fail
    for number in range(2):
        lanes.launch("decode", StepPlan(number, ()))
        assert told.acquire(timeout=GUARD_SECONDS), "the lane died without a word"
    failed, whole = lanes.landed()
    assert failed.result is error
    assert not isinstance(whole.result, BaseException)
    assert lanes.close() == []


def test_a_step_that_lands_between_the_look_and_the_wait_is_not_slept_through(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It wakes the scheduler once, and the drain takes that for one command among others."""
    harness = Harness(overlap=True, trace=lambda phase: at(phase))
    scheduler = harness.scheduler
    landed: list[str] = []

    def at(phase: str) -> None:
        if phase == "drain" and harness.lanes.running and not landed:
            harness.land()
            scheduler._inbox.wake()
            landed.append(phase)

    def wait(inbox: Inbox, seconds: float | None = None) -> object:
        assert not inbox._commands.empty(), "it would sleep while a step has landed"
        return inbox._commands.get_nowait()

    monkeypatch.setattr(Inbox, "wait_command", wait)
    harness.submit("a", 3, max_tokens=9)
    for _ in range(3):
        scheduler.iterate(park=True)
    assert landed
    assert len(harness.tokens("a")) == 1


def test_hundreds_of_requests_on_threads_say_what_they_say_alone() -> None:
    with threaded(max_batch=8) as world:
        names = [f"r{number}" for number in range(200)]
        for number, name in enumerate(names):
            world.submit(name, 1 + number % 40, max_tokens=1 + number % 9)
        for _ in names:
            assert world.record.ended.acquire(timeout=GUARD_SECONDS), "it hangs"
    for number, name in enumerate(names):
        said = [e.token.token_id for e in world.record.events if e.request_id == name and e.token]
        assert said == generate(prompt_of(name, 1 + number % 40), 1 + number % 9)
    world.check_over()


@pytest.mark.usefixtures("quiet")
def test_what_is_no_error_of_a_step_ends_the_loop_and_every_request_once() -> None:
    gate = StepGate(open=False, guard_seconds=GUARD_SECONDS)
    world = Threaded(gate=gate)

    def fail(plan: StepPlan) -> None:
        if plan.kind == "decode":
            raise SystemExit(3)

    world.executor.before_step = fail
    for name in ("a", "b"):
        world.submit(name, 3, max_tokens=9)
    world.submit("long", 60)
    world.thread.start()
    gate.open()
    world.join()
    assert isinstance(world.raised, SystemExit)
    assert {world.end(name) for name in world.requests} == {("error", EngineDead.__name__)}
    world.check_over()


def test_stop_waits_for_the_steps_in_flight_and_ends_their_requests_once() -> None:
    gate = StepGate(open=False, guard_seconds=GUARD_SECONDS)
    with threaded(gate) as world:
        world.submit("a", 3, max_tokens=9)
        gate.held_sync(1)
        gate.allow(1)
        gate.held_sync(2)  # decodes now
        world.submit("long", 60)
        gate.held_sync(3)
        world.submit("deferred", 60)
        world.scheduler.stop()
    assert world.raised is None
    assert {world.end(name) for name in world.requests} == {("abort", GenerationCancelled.__name__)}
    assert sorted(world.executor.dropped) == ["a", "long"]
    world.check_over()


def test_a_failed_step_fails_the_requests_of_its_lane_only() -> None:
    harness = Harness(overlap=True, max_prefill_tokens=8)
    harness.submit("a", 3, max_tokens=9)
    harness.step()
    harness.land()
    harness.submit("long", 20)
    harness.step()
    assert harness.queue(State.INFLIGHT) == ["a", "long"]

    def fail(plan: StepPlan) -> None:
        if plan.kind == "prefill":
            raise ValueError("a bad chunk")

    harness.executor.before_step = fail
    harness.run_all()
    assert harness.end("long").reason == "error"
    assert harness.tokens("a") == harness.expected("a", 9)


def test_forks_are_made_while_the_other_lane_runs() -> None:
    harness = Harness(overlap=True, max_prefill_tokens=64)
    harness.submit("a", 3, max_tokens=30)
    harness.step()
    harness.land()
    prompt = prompt_of("same", 22)
    parent = harness.submit("0", prompt, max_tokens=5)
    for name in ("1", "2"):
        harness.submit(name, prompt, max_tokens=5, fork_of=parent)
    harness.step()
    assert set(harness.lanes.running) == {"decode", "prefill"}
    harness.lanes.land("prefill")
    harness.step()
    assert "decode" in harness.lanes.running
    assert len(harness.executor.copied_blocks) == 2
    harness.run_all()
    for name in ("0", "1", "2"):
        assert harness.tokens(name) == harness.expected(name, 5)
    assert harness.tokens("a") == harness.expected("a", 30)
