"""The scheduler: one thread that owns all request state and drives the executor.

Any thread submits and cancels; `iterate` is one turn of the loop, in the order that the design
fixes: poll, drain, sweep, publish load, then reclaim and prefetch, control, park or admit, plan,
execute, resolve, deliver.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from typing import TYPE_CHECKING

from qwen3_asgi.errors import EngineDead, GenerationCancelled
from qwen3_asgi.scheduler.admission import Admission
from qwen3_asgi.scheduler.arrivals import Arrivals
from qwen3_asgi.scheduler.blocks import BlockPool
from qwen3_asgi.scheduler.control import Control, Controls
from qwen3_asgi.scheduler.deadlines import Deadlines
from qwen3_asgi.scheduler.effects import finish
from qwen3_asgi.scheduler.endings import Endings
from qwen3_asgi.scheduler.events import Event, EventSink, FinishReason, SchedulerObserver
from qwen3_asgi.scheduler.inbox import (
    Cancelled,
    ClearPrefixCache,
    Command,
    Inbox,
    Stop,
    Submit,
    Wake,
)
from qwen3_asgi.scheduler.integrity import check_integrity
from qwen3_asgi.scheduler.lanes import ThreadLanes
from qwen3_asgi.scheduler.load import LoadSnapshot, take_snapshot
from qwen3_asgi.scheduler.loading import Loading
from qwen3_asgi.scheduler.observer import GuardedObserver
from qwen3_asgi.scheduler.pace import Pace
from qwen3_asgi.scheduler.plan import RequestId
from qwen3_asgi.scheduler.queues import QueueTable
from qwen3_asgi.scheduler.request import Limits, Request, State
from qwen3_asgi.scheduler.steps import Steps
from qwen3_asgi.scheduler.sweep import Sweeper
from qwen3_asgi.scheduler.tiers import TierIndex

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from qwen3_asgi.scheduler.executor import ModelExecutor
    from qwen3_asgi.scheduler.lanes import Lane, Lanes
    from qwen3_asgi.scheduler.steps import Step

logger = logging.getLogger(__name__)


class Scheduler:
    """Queues, KV block tables and the loop of one engine.

    Args:
        executor: runs the steps; touched by the scheduler thread only, and by its lanes.
        sink: takes each step's events.
        max_batch: most running requests.
        max_prefill_tokens: most prompt tokens in one step.
        prefix_cache: share full blocks between equal prefixes.
        overlap: run prefill beside decode, on threads; given `Lanes` instead of true, on those.
        pipelined: with `overlap`, launch a decode step before the tokens of the last are known.
        max_failures: so many failed steps in a row end the loop.
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
        overlap: bool | Lanes = False,
        pipelined: bool = False,
        max_failures: int = 8,
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
        tiers = executor.tiers if prefix_cache else None
        index = None if tiers is None else TierIndex(tiers)
        self._pool = BlockPool(
            executor.num_kv_blocks,
            executor.block_size,
            prefix_cache=prefix_cache,
            on_evict=None if index is None else index.store,
        )
        self._loading = None if index is None else Loading(index, self._queues, self._pool, clock)
        self._controls = Controls(executor, self._queues)
        self._deadlines = Deadlines()
        self._pace = Pace(clock)
        self._admission = Admission(
            self._queues,
            self._pool,
            self.limits,
            None if self._loading is None else self._loading.last_offer,
        )
        self._endings = Endings(self._queues, self._pool, executor, self._observer, self._loading)
        self._sweeper = Sweeper(
            self._inbox, self._deadlines, self._queues, self._endings, self._observer, clock
        )
        self._arrivals = Arrivals(
            self._queues,
            self.limits,
            self._controls,
            self._deadlines,
            self._loading,
            self._endings,
            self._inbox.cancel,
        )
        lanes = ThreadLanes(executor, self._inbox.wake) if overlap is True else overlap or None
        self._steps = Steps(
            executor,
            lanes,
            self._queues,
            self._pool,
            self.limits,
            self._admission,
            self._endings,
            self._observer,
            clock,
            max_failures,
            before_write=(lambda: None) if index is None else index.flush,
            pipelined=pipelined,
        )
        if tiers is not None:
            executor.on_landed(self._inbox.wake)
        self._arrived: deque[Command] = deque()  # taken from the inbox, not carried out yet
        self._stopping = False
        self._iteration = 0

    # ---- any thread ----

    def submit(self, *requests: Request) -> None:
        """Hand requests over; their events go to the sink, each terminal one exactly once.

        What is handed over in one call arrives in one iteration: a request and its forks.

        Raises:
            EngineDead: the loop has ended.
        """
        self._put(Submit(requests))

    def control(self, control: Control) -> None:
        """Hand a control command over; its future tells when it was carried out.

        Raises:
            EngineDead: the loop has ended.
        """
        self._put(control)

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

    @property
    def running_since(self) -> float | None:
        """When the step that has been running for longest was begun; None between steps."""
        return self._steps.running_since

    # ---- the scheduler thread ----

    def run(self) -> None:
        """Loop until `stop`. Whatever ends it, every live request gets its terminal event."""
        try:
            while self.iterate(park=True):
                pass
            self._close(GenerationCancelled("the engine was stopped"))
        except BaseException as error:
            logger.exception("the scheduler thread failed")
            dead = error if isinstance(error, EngineDead) else None
            self._close(dead or EngineDead(f"the scheduler thread failed: {error!r}"))
            raise

    def iterate(self, *, park: bool = False) -> bool:
        """One turn of the loop; returns False once it was told to stop.

        With `park` it waits for a command when there is nothing to do, and returns when one has
        come; the next turn drains it.
        """
        self._iteration += 1
        if self._steps.flying:
            self._phase("poll")
            self._steps.poll()
        self._phase("drain")
        self._drain()
        self._phase("sweep")
        self._sweeper.sweep()
        self._phase("publish")
        self._publish()
        self._deliver()
        if self._stopping:
            return False
        if self._loading is not None:
            self._phase("reclaim")
            self._loading.reclaim()
            self._phase("prefetch")
            self._loading.prefetch()
        if self._controls.num_pending:
            self._phase("control")
            self._arrivals.control()
            self._publish()  # who is refused for want of an adapter must not wait for a step
            self._deliver()
        if not len(self._queues):
            if park:
                self._phase("park")
                self._arrived.append(self._inbox.wait_command())
            return True
        self._phase("admit")
        self._admit()
        self._phase("plan")
        planned = self._steps.plan()
        self._publish()  # a long prefill must not show its requests as waiting
        if planned:
            self._run(planned)
        elif park:
            self._wait_for_landing()
        else:
            self._check_progress()
        return True

    def check_integrity(self) -> None:
        """Compare all bookkeeping; for tests and for idle moments.

        Raises:
            RuntimeError: something is lost, counted twice, or shared while it is written to.
        """
        check_integrity(self._queues, self._pool, self._loading)

    def live_requests(self, state: State) -> list[RequestId]:
        """Ids in one queue, in order. Scheduler thread only (or a loop that is not running)."""
        return [request.id for request in self._queues[state]]

    def _put(self, command: Command) -> None:
        if self._closed:
            raise _gone()
        self._inbox.put(command)
        if self._closed:  # the loop ended in between: nobody else would answer
            self._refuse(self._inbox.take_commands())

    def _drain(self) -> None:
        self._arrived.extend(self._inbox.take_commands())
        while self._arrived:
            match self._arrived.popleft():
                case Submit(requests):
                    for request in requests:
                        self._arrivals.accept(request)
                case Control() as control:
                    self._controls.add(control)
                case ClearPrefixCache():
                    self._pool.clear_cache()
                    if self._loading is not None:
                        self._loading.index.clear()
                case Stop():
                    self._stopping = True
                case Wake():
                    pass

    def _publish(self) -> None:
        self._load = take_snapshot(
            self._queues,
            self._pool,
            num_adapters=len(self._controls.adapters),
            iteration=self._iteration,
            step=self._steps.number,
            finish_rate=self._pace.rate,
        )
        self._observer.on_load(self._load)

    def _admit(self) -> None:
        for request in self._admission.grow():
            self._observer.on_preempt(request)
            if self._loading is not None:
                self._loading.arrived(request)
        for request in self._admission.admit():
            if not request.admitted:
                request.admitted = True
                request.admitted_at = self.clock()
                request.cached_tokens = request.num_computed
                self._observer.on_admit(request, request.cached_tokens)

    def _run(self, planned: Sequence[tuple[Lane, Step]]) -> None:
        self._phase("execute")
        for lane, step in planned:
            if self._steps.overlaps:
                self._steps.launch(lane, step)
                continue
            result = self._steps.execute(step)
            self._phase("resolve")
            self._steps.land(step, result)
        self._publish()  # before delivery: who has seen an end sees a load without it
        self._phase("deliver")
        self._deliver()

    def _wait_for_landing(self) -> None:
        """Nothing can be begun before something has landed, or a command has come."""
        # What landed since the poll has woken us, but the drain may have taken that for nothing.
        if self._steps.has_landed():
            return
        self._check_progress()
        self._phase("park")
        deadline = self._deadlines.next(self._queues)
        seconds = None if deadline is None else max(0.0, deadline - self.clock())
        self._arrived.append(self._inbox.wait_command(seconds))

    def _check_progress(self) -> None:
        if self._steps.flying or (self._loading is not None and self._loading.busy):
            return
        # With nobody running the whole pool is available and `check_fits` has passed, so the
        # head of `deferred` is always admitted. Spinning or parking here would hang clients.
        raise RuntimeError("live requests, but nothing to run")

    def _deliver(self) -> None:
        endings = self._endings
        self._pace.note(endings.num_finished)
        endings.num_finished = 0
        if endings.events:
            events, endings.events = endings.events, []
            self._send(events)

    def _send(self, events: Sequence[Event]) -> None:
        try:
            self._sink.deliver(events)
        except Exception:
            logger.exception("delivering %d events failed", len(events))

    def _close(self, error: EngineDead | GenerationCancelled) -> None:
        self._ended_by = error
        self._closed = True
        self._steps.close()
        reason: FinishReason = "error" if isinstance(error, EngineDead) else "abort"
        for request in list(self._queues):
            self._endings.end(request, finish(request, reason, error=error))
        self._controls.refuse(_gone())
        self._refuse([*self._arrived, *self._inbox.take_commands()])
        self._publish()
        self._deliver()

    def _refuse(self, commands: Iterable[Command]) -> None:
        """Answer what nobody will carry out. After the end, on the thread of a late submitter."""
        for command in commands:
            if isinstance(command, Submit):
                for request in command.requests:
                    end = finish(request, "abort", error=self._ended_by)
                    self._observer.on_finish(request, end)
                    self._send([Event(request.id, None, end)])
            elif isinstance(command, Control):
                command.refuse(_gone())

    def _phase(self, name: str) -> None:
        if self._trace is not None:
            self._trace(name)


def _gone() -> EngineDead:
    return EngineDead("the scheduler has ended")
