"""The scheduler: one thread that owns all request state and drives the executor.

Any thread submits and cancels; `iterate` is one turn of the loop, in the order that the design
fixes: drain, sweep, publish load, then park or admit, plan, execute, resolve, deliver.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from typing import TYPE_CHECKING

from qwen3_asgi.errors import EngineDead, GenerationCancelled, GenerationFailed, InvalidRequest
from qwen3_asgi.scheduler.admission import admit, give_back, grow_active
from qwen3_asgi.scheduler.blocks import BlockPool
from qwen3_asgi.scheduler.effects import advance, append_token, finish
from qwen3_asgi.scheduler.events import Event, EventSink, Finish, FinishReason, SchedulerObserver
from qwen3_asgi.scheduler.inbox import (
    Cancelled,
    ClearPrefixCache,
    Command,
    Inbox,
    Stop,
    Submit,
    Wake,
)
from qwen3_asgi.scheduler.load import LoadSnapshot
from qwen3_asgi.scheduler.observer import GuardedObserver
from qwen3_asgi.scheduler.plan import RequestId, Row, StepPlan, StepResult
from qwen3_asgi.scheduler.planner import plan_step
from qwen3_asgi.scheduler.queues import QueueTable
from qwen3_asgi.scheduler.request import Limits, Request, State, check_fits
from qwen3_asgi.scheduler.sweep import collect

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from qwen3_asgi.scheduler.executor import ModelExecutor

logger = logging.getLogger(__name__)


class Scheduler:
    """Queues, KV block tables and the loop of one engine.

    Args:
        executor: runs the steps; touched by the scheduler thread only.
        sink: takes each step's events.
        max_batch: most running requests.
        max_prefill_tokens: most prompt tokens in one step.
        prefix_cache: share full blocks between equal prefixes.
        observer: takes measurements.
        clock: monotonic seconds.
        trace: called with the name of each phase as it begins; for tests and timelines.
    """

    def __init__(
        self,
        executor: ModelExecutor,
        sink: EventSink,
        *,
        max_batch: int = 32,
        max_prefill_tokens: int = 512,
        prefix_cache: bool = True,
        observer: SchedulerObserver | None = None,
        clock: Callable[[], float] = time.monotonic,
        trace: Callable[[str], None] | None = None,
    ) -> None:
        self.limits = Limits(
            block_size=executor.block_size,
            num_kv_blocks=executor.num_kv_blocks,
            max_context_tokens=executor.max_context_tokens,
            max_batch=max_batch,
            max_prefill_tokens=max_prefill_tokens,
        )
        self.clock = clock
        self._executor = executor
        self._sink = sink
        self._observer = GuardedObserver(observer)
        self._trace = trace
        # Shared with other threads: the inbox (lock-free), `_load` (one reference, replaced whole),
        # `_closed` (a bool that only ever becomes true; `_ended_by` is set before it).
        self._inbox = Inbox()
        self._load = LoadSnapshot(kv_total_blocks=executor.num_kv_blocks)
        self._closed = False
        self._ended_by: EngineDead | GenerationCancelled | None = None
        # Owned by the scheduler thread.
        self._queues = QueueTable()
        self._pool = BlockPool(
            executor.num_kv_blocks, executor.block_size, prefix_cache=prefix_cache
        )
        self._carried_cancels: Mapping[RequestId, Cancelled] = {}
        self._arrived: deque[Command] = deque()  # taken from the inbox, not carried out yet
        self._events: list[Event] = []
        self._stopping = False
        self._iteration = 0
        self._step = 0

    # ---- any thread ----

    def submit(self, request: Request) -> None:
        """Hand a request over; its events go to the sink, the terminal one exactly once.

        Raises:
            EngineDead: the loop has ended.
        """
        if self._closed:
            raise EngineDead("the scheduler has ended")
        self._inbox.put(Submit(request))
        if self._closed:  # the loop ended in between: nobody else would answer
            self._refuse(self._inbox.take_commands())

    def cancel(self, request_id: RequestId | str) -> None:
        """Drop a request at the top of the next iteration. Idempotent, lock-free, re-entrant."""
        request_id = RequestId(request_id)
        request = self._queues.get(request_id)
        forwarded = 0 if request is None else request.forwarded_tokens
        self._inbox.cancel(Cancelled(request_id, forwarded))

    def clear_prefix_cache(self) -> None:
        self._inbox.put(ClearPrefixCache())

    def stop(self) -> None:
        """End the loop; what is live then ends with "abort"."""
        self._inbox.put(Stop())

    @property
    def load(self) -> LoadSnapshot:
        """The snapshot as last published; takes no lock."""
        return self._load

    # ---- the scheduler thread ----

    def run(self) -> None:
        """Loop until `stop`. Whatever ends it, every live request gets its terminal event."""
        try:
            while self.iterate(park=True):
                pass
            self._close(GenerationCancelled("the engine was stopped"))
        except BaseException as error:
            logger.exception("the scheduler thread failed")
            self._close(EngineDead(f"the scheduler thread failed: {error!r}"))
            raise

    def iterate(self, *, park: bool = False) -> bool:
        """One turn of the loop; returns False once it was told to stop.

        With `park` it waits for a command when there is nothing to do, and returns when one has
        come; the next turn drains it.
        """
        self._iteration += 1
        self._phase("drain")
        self._drain()
        self._phase("sweep")
        self._sweep()
        self._phase("publish")
        self._publish()
        self._deliver()
        if self._stopping:
            return False
        if not len(self._queues):
            if park:
                self._phase("park")
                self._arrived.append(self._inbox.wait_command())
            return True
        self._phase("admit")
        self._admit()
        self._phase("plan")
        plan = self._plan()
        self._publish()  # a long prefill must not show its requests as waiting
        self._phase("execute")
        result = self._execute(plan)
        self._phase("resolve")
        self._resolve(plan, result)
        self._publish()  # before delivery: who has seen an end sees a load without it
        self._phase("deliver")
        self._deliver()
        return True

    def check_integrity(self) -> None:
        """Compare all bookkeeping; for tests and for idle moments.

        Raises:
            RuntimeError: a block or a request is lost or counted twice.
        """
        self._pool.check_integrity([request.blocks for request in self._queues])
        if sum(len(self._queues[state]) for state in State) != len(self._queues):
            raise RuntimeError("a live request is in no queue, or in two")

    def live_requests(self, state: State) -> list[RequestId]:
        """Ids in one queue, in order. Scheduler thread only (or a loop that is not running)."""
        return list(self._queues[state])

    def _drain(self) -> None:
        self._arrived.extend(self._inbox.take_commands())
        while self._arrived:
            match self._arrived.popleft():
                case Submit(request):
                    self._accept(request)
                case ClearPrefixCache():
                    self._pool.clear_cache()
                case Stop():
                    self._stopping = True
                case Wake():
                    pass

    def _accept(self, request: Request) -> None:
        try:
            request.max_tokens = check_fits(request.prompt_len, request.max_tokens, self.limits)
            if self._queues.get(request.id) is not None:
                raise InvalidRequest(f"request id {request.id!r} is in use", param="request_id")
        except InvalidRequest as error:
            request.finished = True
            end = finish(request, "error", error=error)
            self._observer.on_finish(request, end)
            self._events.append(Event(request.id, None, end))
            return
        self._queues.put(request, State.DEFERRED)

    def _sweep(self) -> None:
        arrived = self._inbox.take_cancelled()
        if not arrived and not self._carried_cancels:
            return
        begin = self.clock()
        sweep = collect(arrived, self._carried_cancels, self._queues)
        self._carried_cancels = sweep.carried
        for request, entry in sweep.due:
            state = request.state
            if state is None:
                continue
            wasted = request.forwarded_tokens - entry.forwarded_tokens
            self._observer.on_cancel(request, state, wasted)
            self._end(request, finish(request, "abort"))
        if sweep.due:
            self._observer.on_sweep(self.clock() - begin, len(sweep.due))

    def _publish(self) -> None:
        self._load = LoadSnapshot(
            num_running=self._queues.num_running,
            num_waiting=self._queues.num_waiting,
            kv_used_blocks=self._pool.used,
            kv_cached_blocks=self._pool.cached,
            kv_total_blocks=self._pool.num_blocks,
            iteration=self._iteration,
            step=self._step,
        )
        self._observer.on_load(self._load)

    def _admit(self) -> None:
        for request in grow_active(self._queues, self._pool):
            self._observer.on_preempt(request)
        now = self.clock()
        for request, cached_tokens in admit(self._queues, self._pool, self.limits):
            if not request.admitted:
                request.admitted = True
                request.admitted_at = now
                request.cached_tokens = cached_tokens
                self._observer.on_admit(request, cached_tokens)

    def _plan(self) -> StepPlan:
        plan = plan_step(
            self._step + 1,
            self._queues[State.ACTIVE].values(),
            self._queues[State.PREFILLING].values(),
            self.limits.max_prefill_tokens,
        )
        if plan is None:
            # With nobody running the whole pool is available and `check_fits` has passed, so the
            # head of `deferred` is always admitted. Spinning or parking here would hang clients.
            raise RuntimeError("live requests, but nothing to run")
        self._step = plan.step
        return plan

    def _execute(self, plan: StepPlan) -> StepResult | GenerationFailed:
        begin = self.clock()
        try:
            result = self._executor.step(plan)
            if not isinstance(result, StepResult):
                raise TypeError(f"the executor returned {type(result).__name__}, no StepResult")
            return result
        except Exception as error:
            logger.exception("step %d failed; its %d requests end", plan.step, len(plan.rows))
            return GenerationFailed(f"the forward pass failed: {type(error).__name__}: {error}")
        finally:
            self._observer.on_step(plan, self.clock() - begin)

    def _resolve(self, plan: StepPlan, result: StepResult | GenerationFailed) -> None:
        now = self.clock()
        for row in plan.rows:
            request = self._queues.get(row.request_id)
            if request is None:
                continue
            if isinstance(result, GenerationFailed):
                self._fail(request, result)
            else:
                self._resolve_row(request, row, result, now)

    def _resolve_row(self, request: Request, row: Row, result: StepResult, now: float) -> None:
        message = result.errors.get(row.request_id)
        if message is not None:
            self._fail(request, GenerationFailed(message))
            return
        advance(request, row, self._pool)
        if row.sample is None:
            return
        token = result.tokens.get(row.request_id)
        if token is None:
            self._fail(request, GenerationFailed("the executor returned no token"))
            return
        if request.state is State.PREFILLING:
            self._queues.put(request, State.ACTIVE)
        end = append_token(request, token)
        first = request.first_token_at is None
        since = request.arrival if request.last_token_at is None else request.last_token_at
        if first:
            request.first_token_at = now
        request.last_token_at = now
        self._observer.on_token(request, now - since, first=first)
        if end is None:
            self._events.append(Event(request.id, token, None))
        else:
            self._end(request, end, Event(request.id, token, end))

    def _fail(self, request: Request, error: GenerationFailed) -> None:
        # What a failed step wrote is not to be trusted, so it must not serve anybody's prefix.
        self._pool.discard(request.blocks)
        request.blocks = []
        self._end(request, finish(request, "error", error=error))

    def _end(self, request: Request, end: Finish, event: Event | None = None) -> None:
        """The one way out: release everything, then queue the one terminal event."""
        if request.finished:
            return
        request.finished = True
        self._queues.remove(request)
        try:
            if request.admitted:
                self._executor.drop_request(request.id)
        except Exception:
            logger.exception("dropping request %s failed in the executor", request.id)
        finally:  # also when the executor ends the loop: nobody else knows this request any more
            give_back(request, self._pool)
            self._events.append(event or Event(request.id, None, end))
        self._observer.on_finish(request, end)

    def _deliver(self) -> None:
        if not self._events:
            return
        events, self._events = self._events, []
        self._send(events)

    def _send(self, events: Sequence[Event]) -> None:
        try:
            self._sink.deliver(events)
        except Exception:
            logger.exception("delivering %d events failed", len(events))

    def _close(self, error: EngineDead | GenerationCancelled) -> None:
        self._ended_by = error
        self._closed = True
        reason: FinishReason = "error" if isinstance(error, EngineDead) else "abort"
        for request in list(self._queues):
            self._end(request, finish(request, reason, error=error))
        self._refuse([*self._arrived, *self._inbox.take_commands()])
        self._publish()
        self._deliver()

    def _refuse(self, commands: Iterable[Command]) -> None:
        """End requests that nobody will run. After the end, on the thread of a late submitter."""
        for command in commands:
            if isinstance(command, Submit):
                request = command.request
                end = finish(request, "abort", error=self._ended_by)
                self._observer.on_finish(request, end)
                self._send([Event(request.id, None, end)])

    def _phase(self, name: str) -> None:
        if self._trace is not None:
            self._trace(name)
