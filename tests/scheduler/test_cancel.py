"""Who may call `cancel`, when, how often and from where: anybody, always, without harm."""

from __future__ import annotations

import gc
import threading
from collections import Counter
from typing import TYPE_CHECKING

from tests.scheduler.harness import EVERYONE, Harness, busy

if TYPE_CHECKING:
    from qwen3_asgi.scheduler.plan import StepPlan


def test_cancel_that_overtakes_its_own_submit_is_not_lost() -> None:
    harness = Harness()

    def submit_and_cancel(phase: str) -> None:
        if phase == "sweep" and not harness.requests:
            harness.submit("late", 3)  # after this iteration's drain
            harness.cancel("late")  # before this iteration's sweep

    harness.scheduler._trace = submit_and_cancel
    harness.step()
    assert harness.ends("late") == []
    harness.step()
    assert harness.end("late").reason == "abort"
    assert harness.executor.rows == []
    harness.run()


def test_cancel_that_overtakes_its_submit_is_not_lost_behind_an_earlier_cancel() -> None:
    harness = Harness()
    harness.cancel("late")  # unknown: carried over once
    harness.step()

    def submit_and_cancel(phase: str) -> None:
        if phase == "sweep" and not harness.requests:
            harness.submit("late", 3)
            harness.cancel("late")

    harness.scheduler._trace = submit_and_cancel
    harness.step(2)
    assert harness.end("late").reason == "abort"
    assert harness.executor.rows == []


def test_cancel_before_the_first_iteration_forwards_nothing() -> None:
    harness = Harness()
    harness.submit("r", 3)
    harness.cancel("r")
    harness.step()
    assert harness.end("r").reason == "abort"
    assert harness.executor.plans == 0
    assert harness.executor.dropped == []


def test_cancel_of_unknown_and_finished_ids_is_harmless() -> None:
    harness = Harness()
    harness.submit("r", 3)
    harness.submit("s", 3, max_tokens=20)
    harness.step(5)
    assert harness.end("r").reason == "length"
    harness.cancel("r", "nobody", "r")
    harness.step(3)
    assert len(harness.ends("r")) == 1
    assert harness.scheduler._sweeper.carried == {}, "an unknown id is kept for ever"
    harness.run()
    assert harness.tokens("s") == harness.expected("s", 20)
    assert Counter(harness.executor.dropped) == Counter("rs")


def test_cancel_is_idempotent() -> None:
    harness = busy()
    for _ in range(1000):
        harness.cancel("a")
    harness.step()
    for _ in range(1000):
        harness.cancel("a")
    harness.step()
    assert harness.end("a").reason == "abort"
    assert harness.executor.dropped == ["a"]
    harness.run()


def test_many_threads_may_cancel_the_same_requests() -> None:
    harness = busy()
    start = threading.Barrier(9)

    def hammer() -> None:
        start.wait()
        for _ in range(125):
            harness.cancel(*EVERYONE)

    threads = [threading.Thread(target=hammer) for _ in range(8)]
    for thread in threads:
        thread.start()
    harness.cancel(*EVERYONE)
    start.wait()
    harness.step(20)
    for thread in threads:
        thread.join(timeout=30)
    harness.run()
    assert {harness.end(name).reason for name in EVERYONE} == {"abort"}


def test_cancel_wakes_a_parked_scheduler() -> None:
    harness = Harness()
    parked, woken = threading.Event(), threading.Event()

    def trace(phase: str) -> None:
        if phase == "park":
            (woken if parked.is_set() else parked).set()

    harness.scheduler._trace = trace
    thread = threading.Thread(target=harness.scheduler.run)
    thread.start()
    assert parked.wait(timeout=30)
    harness.cancel("nobody")
    assert woken.wait(timeout=30), "the cancel did not wake the thread"
    harness.scheduler.stop()
    thread.join(timeout=30)
    assert not thread.is_alive()


def test_loop_in_its_own_thread_ends_what_was_cancelled_and_parks() -> None:
    harness = Harness()
    started, idle = threading.Event(), threading.Event()
    harness.executor.before_step = lambda plan: started.set()

    def trace(phase: str) -> None:
        if phase == "park" and started.is_set():
            idle.set()

    harness.scheduler._trace = trace
    thread = threading.Thread(target=harness.scheduler.run)
    thread.start()
    harness.submit("endless", 3, max_tokens=None)
    assert started.wait(timeout=30)
    harness.cancel("endless")
    assert idle.wait(timeout=30)
    assert harness.scheduler.load.idle
    assert harness.end("endless").reason == "abort"
    harness.scheduler.stop()
    thread.join(timeout=30)
    assert not thread.is_alive()


def test_cancel_from_a_finalizer_on_the_scheduler_thread_does_not_deadlock() -> None:
    harness = busy()

    class Handle:
        """Refers to itself, so that only the garbage collector ends it."""

        def __init__(self, name: str) -> None:
            self.name, self.me = name, self

        def __del__(self) -> None:
            harness.cancel(self.name)

    def drop_handles(plan: StepPlan) -> None:
        harness.executor.before_step = None
        for name in EVERYONE:
            Handle(name)
        gc.collect()

    harness.executor.before_step = drop_handles
    thread = threading.Thread(target=harness.step, args=(2,))
    thread.start()
    thread.join(timeout=30)
    assert not thread.is_alive()
    assert {harness.end(name).reason for name in EVERYONE} == {"abort"}
    harness.check_idle()
