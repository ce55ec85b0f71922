"""From queues to a step and back: plan it, run it here or on a lane, apply what came out."""

from __future__ import annotations

import logging
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
from qwen3_asgi.scheduler.plan import Row, SampledToken, StepPlan, StepResult
from qwen3_asgi.scheduler.planner import decoding, prefill_rows
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
        self, number: int, decoding: list[Request], prefilling: list[tuple[Request, Row]]
    ) -> None:
        self.decoding = decoding
        self.prefilling = prefilling
        rows = [request.row for request in decoding if request.row is not None]
        rows += [row for _, row in prefilling]
        self.plan = StepPlan(number, tuple(rows))
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
        self._flying: dict[Lane, Step] = {}
        self._landed: list[Landed] = []
        # The step that runs on this thread.
        self._running: Step | None = None

    @property
    def running_since(self) -> float | None:
        """When the oldest of the running steps was begun; for a watchdog, from any thread."""
        running = self._running
        # `values` is copied in one step: the scheduler thread launches and lands meanwhile.
        begun = [step.begun for step in [*self._flying.values()]]
        if running is not None:
            begun.append(running.begun)
        return min(begun, default=None)

    @property
    def flying(self) -> bool:
        """Whether a launched step has not landed yet."""
        return bool(self._flying)

    def plan(self) -> list[tuple[Lane, Step]]:
        """What can be run now: one step of everything, or with lanes one for each free lane."""
        queues = self._queues
        active = queues[State.ACTIVE]
        prefilling = queues[State.PREFILLING]
        budget = self._limits.max_prefill_tokens
        planned: list[tuple[Lane, Step]] = []

        def add(lane: Lane, decode: list[Request], prefill: list[tuple[Request, Row]]) -> None:
            if decode or prefill:
                self.number += 1
                planned.append((lane, Step(self.number, decode, prefill)))

        growing = self._admission.growing
        if self._lanes is None:
            add("decode", decoding(active, growing), prefill_rows(prefilling, budget))
            return planned
        if "decode" not in self._flying:
            add("decode", decoding(active, growing), [])
        if "prefill" not in self._flying:
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
            self._queues.put(request, State.INFLIGHT)
        step.begun = self._clock()
        self._flying[lane] = step
        self._lanes.launch(lane, step.plan)

    def execute(self, step: Step) -> StepResult | Exception:
        """Run a step on this thread; `land` its result."""
        self._before_write()
        begin = step.begun = self._clock()
        self._running = step
        try:
            return self._executor.step(step.plan)
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
        if self._lanes is not None:
            for landed in [*self._landed, *self._lanes.close()]:
                step = self._flying.pop(landed.lane)
                self._observer.on_step(step.plan, landed.seconds)

    def land(self, step: Step, result: StepResult | BaseException) -> None:
        """Apply a step's result to its requests.

        Raises:
            EngineDead: the executor said so, or too many steps in a row have failed.
            BaseException: the executor raised something that is no error of a step.
        """
        if not isinstance(result, StepResult):
            if isinstance(result, BaseException) and not isinstance(result, Exception):
                raise result
            if not isinstance(result, Exception):
                result = TypeError(f"the executor returned {type(result).__name__}, no StepResult")
            self._fail(step, result)
            return
        self._failures = 0
        now = self._clock()
        endings = self._endings
        first: list[tuple[Request, float]] = []
        intervals: dict[float, int] = {}
        if step.decoding:
            odd = apply_decoded(
                step.decoding,
                result.tokens,
                now,
                self._pool,
                endings.events,
                self._admission.growing,
                intervals,
            )
            for request, token in odd:
                if token is None:
                    self._no_token(request, result)
                else:
                    self._emit(request, token)
        for request, row in step.prefilling:
            self._land_prefill(request, row, result, now, first, intervals)
        if first or intervals:
            self._observer.on_tokens(first, intervals)

    def _land_from(self, lane: Lane, result: StepResult | BaseException, seconds: float) -> None:
        step = self._flying.pop(lane)
        self._observer.on_step(step.plan, seconds)
        for request in step.decoding:
            self._queues.put(request, State.ACTIVE)
        for request, _ in reversed(step.prefilling):  # the first of them go on first
            self._queues.put(request, State.PREFILLING, front=True)
        self.land(step, result)

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
