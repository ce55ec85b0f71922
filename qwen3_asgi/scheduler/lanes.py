"""Steps that run beside the scheduler thread: a long prefill beside decode, each on its thread.

The scheduler launches a step and goes on; it learns that the step has landed at the top of a later
iteration. On CUDA each lane's thread has its own stream, on a CPU they share the cores.
"""

from __future__ import annotations

import threading
import time
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from qwen3_asgi.scheduler.executor import ModelExecutor
    from qwen3_asgi.scheduler.plan import StepPlan, StepResult

Lane = Literal["decode", "prefill"]
LANES: tuple[Lane, ...] = ("decode", "prefill")


class Landed(NamedTuple):
    """The end of a launched step: its result, or what it raised; and how many seconds it took."""

    lane: Lane
    plan: StepPlan
    result: StepResult | BaseException
    seconds: float


class Lanes(Protocol):
    """Runs at most one step on each lane. Called on the scheduler thread only."""

    def launch(self, lane: Lane, plan: StepPlan) -> None:
        """Start a step; returns at once. The lane must be free."""
        ...

    def landed(self) -> Sequence[Landed]:
        """What has ended since the last call, without waiting."""
        ...

    def close(self) -> Sequence[Landed]:
        """Wait for the running steps and return them. No other call follows."""
        ...


class ThreadLanes:
    """One worker thread a lane.

    Args:
        executor: its `step` is called on the lanes' threads.
        wake: called on a lane's thread when a step has landed; never blocks.
    """

    def __init__(self, executor: ModelExecutor, wake: Callable[[], None]) -> None:
        self._executor = executor
        self._wake = wake
        self._landed: SimpleQueue[Landed] = SimpleQueue()
        self._plans: dict[Lane, SimpleQueue[StepPlan | None]] = {
            lane: SimpleQueue() for lane in LANES
        }
        self._threads = [
            threading.Thread(
                target=self._run, args=(lane,), name=f"qwen3-asgi {lane} lane", daemon=True
            )
            for lane in LANES
        ]
        for thread in self._threads:
            thread.start()

    def launch(self, lane: Lane, plan: StepPlan) -> None:
        self._plans[lane].put(plan)

    def landed(self) -> Sequence[Landed]:
        landed: list[Landed] = []
        try:
            while True:
                landed.append(self._landed.get_nowait())
        except Empty:
            return landed

    def close(self) -> Sequence[Landed]:
        for plans in self._plans.values():
            plans.put(None)
        for thread in self._threads:
            thread.join()
        return self.landed()

    def _run(self, lane: Lane) -> None:
        while (plan := self._plans[lane].get()) is not None:
            begin = time.monotonic()
            result: StepResult | BaseException
            try:
                result = self._executor.step(plan)
            except BaseException as error:  # raised again on the scheduler thread, as without lanes
                result = error
            self._landed.put(Landed(lane, plan, result, time.monotonic() - begin))
            self._wake()
