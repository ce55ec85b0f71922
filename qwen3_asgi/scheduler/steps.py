"""From queues to a step and back: plan it, run it here or on a lane, apply what came out."""

from __future__ import annotations

import logging
from collections import deque
from typing import TYPE_CHECKING

from qwen3_asgi.errors import EngineDead, GenerationFailed
from qwen3_asgi.scheduler.effects import (
    advance,
    apply_decoded,
    begin_decoding,
    check_end,
)
from qwen3_asgi.scheduler.events import Event
from qwen3_asgi.scheduler.forks import fork_riders
from qwen3_asgi.scheduler.lanes import LANES
from qwen3_asgi.scheduler.plan import Row, SampledToken, StepPlan, StepResult, result_of
from qwen3_asgi.scheduler.planner import ahead_of, decoding, prefill_rows
from qwen3_asgi.scheduler.request import Limits, Request, State

if TYPE_CHECKING:
    from collections.abc import Callable

    from qwen3_asgi.scheduler.admission import Admission
    from qwen3_asgi.scheduler.blocks import BlockPool
    from qwen3_asgi.scheduler.endings import Endings
    from qwen3_asgi.scheduler.executor import ModelExecutor
    from qwen3_asgi.scheduler.lanes import Landed, Lane, Lanes
    from qwen3_asgi.scheduler.observer import GuardedObserver
    from qwen3_asgi.scheduler.queues import QueueTable

logger = logging.getLogger(__name__)


class Step:
    """A planned step and the requests behind its rows, in the same order."""

    __slots__ = ("begun", "decoding", "plan", "prefilling")

    def __init__(
        self,
        number: int,
        decoding: list[Request],
        prefilling: list[tuple[Request, Row]],
        behind: int | None = None,
    ) -> None:
        self.decoding = decoding
        self.prefilling = prefilling
        rows = [request.row for request in decoding if request.row is not None]
        rows += [row for _, row in prefilling]
        self.plan = StepPlan(number, tuple(rows), behind)
        self.begun = 0.0

    def requests(self) -> list[Request]:
        return self.decoding + [request for request, _ in self.prefilling]


class Steps:
    """Owned by the scheduler thread. `number` counts the steps begun.

    `before_write` is called before anything writes to blocks: what is evicted must be read first.
    """

    def __init__(
        self,
        executor: ModelExecutor,
        lanes: Lanes | None,
        queues: QueueTable,
        pool: BlockPool,
        limits: Limits,
        admission: Admission,
        endings: Endings,
        observer: GuardedObserver,
        clock: Callable[[], float],
        max_failures: int,
        before_write: Callable[[], None],
        *,
        pipelined: bool = False,
    ) -> None:
        self.number = 0
        self._executor = executor
        self._lanes = lanes
        self._queues = queues
        self._pool = pool
        self._limits = limits
        self._admission = admission
        self._endings = endings
        self._observer = observer
        self._clock = clock
        self._max_failures = max_failures
        self._before_write = before_write
        self._failures = 0
        self._pipelined = pipelined
        # Oldest first; the decode lane has two with pipelined decode, every other at most one.
        self._flying: dict[Lane, deque[Step]] = {lane: deque() for lane in LANES}
        self._landed: list[Landed] = []
        # The step that runs on this thread.
        self._running: Step | None = None

    @property
    def running_since(self) -> float | None:
        """When the oldest of the running steps was begun; for a watchdog, from any thread."""
        running = self._running
        # Copied in one step: the scheduler thread launches and lands meanwhile.
        begun = [step.begun for steps in self._flying.values() for step in tuple(steps)]
        if running is not None:
            begun.append(running.begun)
        return min(begun, default=None)

    @property
    def flying(self) -> bool:
        """Whether a launched step has not landed yet."""
        return any(self._flying.values())

    def plan(self) -> list[tuple[Lane, Step]]:
        """What can be run now: one step of everything, or with lanes one for each free lane."""
        queues = self._queues
        active = queues[State.ACTIVE]
        prefilling = queues[State.PREFILLING]
        budget = self._limits.max_prefill_tokens
        planned: list[tuple[Lane, Step]] = []

        def add(
            lane: Lane,
            decode: list[Request],
            prefill: list[tuple[Request, Row]],
            behind: int | None = None,
        ) -> None:
            if decode or prefill:
                self.number += 1
                planned.append((lane, Step(self.number, decode, prefill, behind)))

        growing = self._admission.growing
        if self._lanes is None:
            add("decode", decoding(active, growing), prefill_rows(prefilling, budget))
            return planned
        running = self._flying["decode"]
        if not running:
            add("decode", decoding(active, growing), [])
        elif self._pipelined and len(running) == 1:
            ahead = ahead_of(running[0].decoding, self._pool, growing)
            behind = running[0].plan.step
            add("decode", ahead + decoding(active, growing), [], behind)
        if not self._flying["prefill"]:
            add("prefill", [], prefill_rows(prefilling, budget))
        return planned

    @property
    def overlaps(self) -> bool:
        """Whether steps are launched and land later."""
        return self._lanes is not None

    def launch(self, lane: Lane, step: Step) -> None:
        """Start a step on its lane; its requests are `inflight` until it has landed."""
        if self._lanes is None:
            raise RuntimeError("there are no lanes")
        self._before_write()
        for request in step.requests():
            request.flying += 1
            if request.flying == 1:
                self._queues.put(request, State.INFLIGHT)
        step.begun = self._clock()
        self._flying[lane].append(step)
        self._lanes.launch(lane, step.plan)

    def execute(self, step: Step) -> StepResult | Exception:
        """Run a step on this thread; `land` its result."""
        self._before_write()
        begin = step.begun = self._clock()
        self._running = step
        try:
            return result_of(self._executor.step(step.plan))
        except Exception as error:
            return error
        finally:
            self._running = None
            self._observer.on_step(step.plan, self._clock() - begin)

    def has_landed(self) -> bool:
        """Whether `poll` would find something."""
        if self._lanes is not None:
            self._landed += self._lanes.landed()
        return bool(self._landed)

    def poll(self) -> None:
        """Apply what has landed."""
        if self.has_landed():
            landed, self._landed = self._landed, []
            for step in landed:
                self._land_from(step.lane, step.result, step.seconds)

    def close(self) -> None:
        """Wait for what is running; its requests are ended by whoever closes."""
        for steps in self._flying.values():
            for ahead in list(steps)[1:]:
                for row in ahead.plan.rows:
                    row.dropped = True
        if self._lanes is not None:
            for landed in [*self._landed, *self._lanes.close()]:
                self._take_down(landed.lane, landed.seconds)

    def land(self, step: Step, result: StepResult | BaseException) -> None:
        """Apply a step's result to its requests.

        Raises:
            EngineDead: the executor said so, or too many steps in a row have failed.
            BaseException: the executor raised something that is no error of a step.
        """
        if not isinstance(result, StepResult):
            if not isinstance(result, Exception):
                raise result
            self._fail(step, result)
            return
        self._failures = 0
        now = self._clock()
        endings = self._endings
        first: list[tuple[Request, float]] = []
        intervals: dict[float, int] = {}
        decoded = step.decoding
        if self._pipelined:  # it was launched before their end was known
            decoded = [request for request in decoded if not request.finished]
        if decoded:
            odd = apply_decoded(
                decoded,
                result.tokens,
                now,
                self._pool,
                endings.events,
                self._admission.growing,
                intervals,
            )
            for request, token in odd:
                if token is not None:
                    self._emit(request, token)
                elif not request.leaving:  # otherwise it was dropped, and is swept now
                    self._no_token(request, result)
        for request, row in step.prefilling:
            self._land_prefill(request, row, result, now, first, intervals)
        if first or intervals:
            self._observer.on_tokens(first, intervals)

    def _land_from(self, lane: Lane, result: StepResult | BaseException, seconds: float) -> None:
        step = self._take_down(lane, seconds)
        for request in step.decoding:
            # One that was cancelled is swept now, though a step that was launched ahead has it.
            if not request.finished and (not request.flying or request.leaving):
                self._queues.put(request, State.ACTIVE)
        for request, _ in reversed(step.prefilling):  # the first of them go on first
            self._queues.put(request, State.PREFILLING, front=True)
        self.land(step, result)

    def _take_down(self, lane: Lane, seconds: float) -> Step:
        """The oldest step of a lane has landed: let go of what it alone has kept."""
        flying = self._flying[lane]
        step = flying.popleft()
        if flying:
            flying[0].begun = self._clock()
        self._observer.on_step(step.plan, seconds)
        for request in step.requests():
            request.flying -= 1
            if request.finished and not request.flying:
                self._endings.let_go(request)
        return step

    def _land_prefill(
        self,
        request: Request,
        row: Row,
        result: StepResult,
        now: float,
        first: list[tuple[Request, float]],
        intervals: dict[float, int],
    ) -> None:
        if row.request_id in result.errors:
            self._no_token(request, result)
            return
        advance(request, row, self._pool)
        if row.sample is None:
            return
        token = result.tokens.get(row.request_id)
        if token is None:
            self._no_token(request, result)
            return
        self._queues.put(request, State.ACTIVE)
        request.token_ids.append(token.token_id)
        if request.first_token_at is None:
            request.first_token_at = now
            first.append((request, now - request.arrival))
            if request.forks:
                fork_riders(request, self._queues, self._pool, self._executor, self._before_write)
        elif request.last_token_at is not None:  # it was preempted in the middle of its output
            waited = now - request.last_token_at
            intervals[waited] = intervals.get(waited, 0) + 1
        request.last_token_at = now
        begin_decoding(request)
        if len(request.token_ids) > request.capacity:
            self._admission.growing.append(request)
        self._emit(request, token)

    def _emit(self, request: Request, token: SampledToken) -> None:
        end = check_end(request, token)
        if end is None:
            self._endings.events.append(Event(request.id, token, None))
        else:
            self._endings.end(request, end, Event(request.id, token, end))

    def _no_token(self, request: Request, result: StepResult) -> None:
        message = result.errors.get(request.id, "the executor returned no token")
        self._endings.fail(request, GenerationFailed(message))

    def _fail(self, step: Step, error: Exception) -> None:
        requests = step.requests()
        logger.error(
            "step %d failed; its %d requests end", step.plan.step, len(requests), exc_info=error
        )
        failure = GenerationFailed(f"the forward pass failed: {type(error).__name__}: {error}")
        self._observer.on_step_failure(step.plan, error)
        for request in requests:
            self._endings.fail(request, failure)
        self._failures += 1
        if isinstance(error, EngineDead):
            raise error
        if self._failures >= self._max_failures:
            raise EngineDead(
                f"{self._failures} steps in a row have failed, the last with {error!r}"
            )
