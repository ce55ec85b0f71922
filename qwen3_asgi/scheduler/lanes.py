"""Steps that run beside the scheduler thread: a long prefill beside decode, each on its thread.

The scheduler launches a step and goes on; it learns that the step has landed at the top of a later
iteration. A step that the executor returns while it is still running is waited for on another
thread, so that its lane can begin the next one meanwhile.
"""

from __future__ import annotations

import threading
import time
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from qwen3_asgi.scheduler.plan import StepResult, result_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from qwen3_asgi.scheduler.executor import ModelExecutor
    from qwen3_asgi.scheduler.plan import RunningStep, StepPlan

Lane = Literal["decode", "prefill"]
LANES: tuple[Lane, ...] = ("decode", "prefill")


class Landed(NamedTuple):
    """The end of a launched step: its result, or what it raised; and how many seconds it took."""

    lane: Lane
    plan: StepPlan
    result: StepResult | BaseException
    seconds: float


class Lanes(Protocol):
    """Runs the steps of each lane in order. Called on the scheduler thread only."""

    def launch(self, lane: Lane, plan: StepPlan) -> None:
        """Start a step, behind those that run on this lane; returns at once."""
        ...

    def landed(self) -> Sequence[Landed]:
        """What has ended since the last call, without waiting."""
        ...

    def close(self) -> Sequence[Landed]:
        """Wait for the running steps and return them. No other call follows."""
        ...


class _Begun(NamedTuple):
    """What `step` returned or raised, and when it was called."""

    plan: StepPlan
    step: StepResult | RunningStep | BaseException
    at: float


class ThreadLanes:
    """A worker thread a lane, and a second one once a step was still running when it returned.

    Args:
        executor: its `step` is called on the lanes' threads.
        wake: called on a lane's thread when a step has landed; never blocks.
    """

    def __init__(self, executor: ModelExecutor, wake: Callable[[], None]) -> None:
        self._landed: SimpleQueue[Landed] = SimpleQueue()
        self._lanes = {lane: _Worker(lane, executor, self._landed, wake) for lane in LANES}

    def launch(self, lane: Lane, plan: StepPlan) -> None:
        self._lanes[lane].plans.put(plan)

    def landed(self) -> Sequence[Landed]:
        landed: list[Landed] = []
        try:
            while True:
                landed.append(self._landed.get_nowait())
        except Empty:
            return landed

    def close(self) -> Sequence[Landed]:
        for worker in self._lanes.values():
            worker.plans.put(None)
        for worker in self._lanes.values():
            worker.join()
        return self.landed()


class _Worker:
    """One lane. The threads share nothing but queues; `_landing` belongs to the first."""

    def __init__(
        self,
        lane: Lane,
        executor: ModelExecutor,
        landed: SimpleQueue[Landed],
        wake: Callable[[], None],
    ) -> None:
        self.plans: SimpleQueue[StepPlan | None] = SimpleQueue()
        self._lane = lane
        self._executor = executor
        self._landed = landed
        self._wake = wake
        self._begun: SimpleQueue[_Begun | None] = SimpleQueue()
        self._landing: threading.Thread | None = None
        self._thread = self._start(f"qwen3-asgi {lane} lane", self._run)

    def join(self) -> None:
        self._thread.join()

    def _start(self, name: str, target: Callable[[], None]) -> threading.Thread:
        thread = threading.Thread(target=target, name=name, daemon=True)
        thread.start()
        return thread

    def _run(self) -> None:
        while (plan := self.plans.get()) is not None:
            at = time.monotonic()
            step: StepResult | RunningStep | BaseException
            try:
                step = self._executor.step(plan)
            except BaseException as error:  # raised again on the scheduler thread, as without lanes
                step = error
            begun = _Begun(plan, step, at)
            if self._landing is None and isinstance(step, (StepResult, BaseException)):
                self._land(begun, step)
                continue
            # From now on all of them, since they land in order.
            if self._landing is None:
                self._landing = self._start(f"qwen3-asgi {self._lane} landing lane", self._wait)
            self._begun.put(begun)
        if self._landing is not None:
            self._begun.put(None)
            self._landing.join()

    def _wait(self) -> None:
        while (begun := self._begun.get()) is not None:
            step = begun.step
            result: StepResult | BaseException
            try:
                result = step if isinstance(step, BaseException) else result_of(step)
            except BaseException as error:
                result = error
            self._land(begun, result)

    def _land(self, begun: _Begun, result: StepResult | BaseException) -> None:
        seconds = time.monotonic() - begun.at
        self._landed.put(Landed(self._lane, begun.plan, result, seconds))
        self._wake()
