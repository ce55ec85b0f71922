"""`StepGate`: a test holds the steps of fake executors, counts them, and makes them fail.

While a step is held nothing is swept, admitted or computed. So a test can let everything happen
that it wants to have happened, and only then let the scheduler go on: no assertion needs a clock.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, NamedTuple

import anyio

from qwen3_asgi.engine.portal import wait_future

if TYPE_CHECKING:
    from qwen3_asgi.scheduler.plan import StepPlan

GUARD_SECONDS = 60.0


class _Waiter(NamedTuple):
    arrived: int | None
    future: Future[int]


class StepGate:
    """Steps pass one by one. Every method may be called from any thread, also on an event loop.

    One gate may stand before several executors: `FakeExecutor(gate=gate)`.

    Args:
        open: let steps pass from the start; else the first one is held.
        guard_seconds: how long a step is held at most (it fails then), and `held` waits.
    """

    def __init__(self, *, open: bool = True, guard_seconds: float = GUARD_SECONDS) -> None:
        self._guard_seconds = guard_seconds
        self._lock = threading.Lock()
        # Below: changed under `_lock` only.
        self._allowed: int | None = None if open else 0  # None: all of them
        self._standing: list[threading.Event] = []
        self._failures: list[Exception] = []
        self._waiters: list[_Waiter] = []
        # The steps that were begun so far, held or not, and the last of them.
        self.arrived = 0
        self.plan: StepPlan | None = None

    def hold(self) -> None:
        """Hold the steps from the next one on."""
        with self._lock:
            self._allowed = 0

    def allow(self, steps: int = 1) -> None:
        """Let so many steps pass, the held one first, then hold again."""
        with self._lock:
            while self._standing and steps:
                self._standing.pop(0).set()
                steps -= 1
            self._allowed = (self._allowed or 0) + steps

    def open(self) -> None:
        """Let every step pass, and the held one."""
        with self._lock:
            self._allowed = None
            while self._standing:
                self._standing.pop().set()

    def fail(self, error: Exception) -> None:
        """Let the next step that passes raise this; called twice, the next two."""
        with self._lock:
            self._failures.append(error)

    async def held(self, arrived: int | None = None) -> int:
        """Wait until a step stands at the gate; returns how many were begun.

        With `arrived`, wait for the step of this number (counted from 1), even if it has passed.

        Raises:
            AssertionError: it never came; probably nothing is running.
        """
        with anyio.move_on_after(self._guard_seconds):
            return await wait_future(self._when_held(arrived))
        raise self._never_came(arrived)

    def held_sync(self, arrived: int | None = None) -> int:
        """`held` for threads."""
        try:
            return self._when_held(arrived).result(self._guard_seconds)
        except TimeoutError:
            raise self._never_came(arrived) from None

    def enter(self, plan: StepPlan) -> None:
        """Called by the executor at the beginning of each step, on the scheduler's thread.

        Raises:
            Exception: what `fail` was given.
            TimeoutError: the step was held for too long.
        """
        go = threading.Event()
        with self._lock:
            self.arrived += 1
            self.plan = plan
            if self._allowed == 0:
                self._standing.append(go)
            else:
                go.set()
                if self._allowed is not None:
                    self._allowed -= 1
            self._answer()
        passed = go.wait(self._guard_seconds)
        with self._lock:
            if not passed and go in self._standing:
                self._standing.remove(go)
                raise TimeoutError(f"a step was held for {self._guard_seconds:g} s")
            if self._failures:
                raise self._failures.pop(0)

    def _when_held(self, arrived: int | None) -> Future[int]:
        future: Future[int] = Future()
        with self._lock:
            self._waiters.append(_Waiter(arrived, future))
            self._answer()
        return future

    def _answer(self) -> None:
        waiting = self._waiters
        self._waiters = []
        for waiter in waiting:
            if self._standing if waiter.arrived is None else self.arrived >= waiter.arrived:
                waiter.future.set_result(self.arrived)
            else:
                self._waiters.append(waiter)

    def _never_came(self, arrived: int | None) -> AssertionError:
        step = "a step" if arrived is None else f"step {arrived}"
        return AssertionError(
            f"{step} was not held within {self._guard_seconds:g} s; {self.arrived} were begun"
        )
