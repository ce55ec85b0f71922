"""Which cancelled requests leave now. The ids are collected once; exactly these are dropped.

A request that is cancelled after the collection is left alone until the next sweep: dropping by
re-reading a flag could take it out of its queue without releasing what it holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from qwen3_asgi.errors import GenerationTimeout
from qwen3_asgi.scheduler.effects import finish
from qwen3_asgi.scheduler.inbox import Cancelled, Inbox
from qwen3_asgi.scheduler.queues import SWEPT_STATES, QueueTable

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from qwen3_asgi.scheduler.deadlines import Deadlines
    from qwen3_asgi.scheduler.endings import Endings
    from qwen3_asgi.scheduler.observer import GuardedObserver
    from qwen3_asgi.scheduler.plan import RequestId
    from qwen3_asgi.scheduler.request import Request


@dataclass(frozen=True, slots=True)
class Sweep:
    """`due` are dropped in this iteration; `carried` are looked at again in the next."""

    due: tuple[tuple[Request, Cancelled], ...]
    carried: Mapping[RequestId, Cancelled]


def collect(
    arrived: Collection[Cancelled], carried: Mapping[RequestId, Cancelled], queues: QueueTable
) -> Sweep:
    """Sort the cancels: due, carried (in flight, or overtaking its own submit), or too late.

    A cancel may be read one iteration before the submit it belongs to, since commands are drained
    first; so an unknown id is carried once. Still unknown then, it has finished long ago.
    Costs in proportion to what was cancelled, not to what is live.
    """
    due: dict[RequestId, tuple[Request, Cancelled]] = {}
    keep: dict[RequestId, Cancelled] = {}
    forks: list[Cancelled] = []  # they go with their parents; grows as it is looked through
    get = queues.get
    for entries in (carried.values(), arrived, forks):
        for entry in entries:
            request_id = entry.request_id
            if request_id in due or request_id in keep:
                continue
            request = get(request_id)
            if request is None:
                if entries is arrived:
                    keep[request_id] = entry
                continue
            if request.state in SWEPT_STATES:
                due[request_id] = (request, entry)
            else:
                keep[request_id] = entry
            if request.forks:
                forks += [
                    Cancelled(fork.id, fork.forwarded_tokens, entry.error)
                    for fork in request.forks
                    if fork.state is not None
                ]
    return Sweep(tuple(due.values()), keep)


class Sweeper:
    """The sweep of one scheduler. Owned by the scheduler thread; never waits.

    `carried` are cancels that wait for their step to land, or for their submit to arrive.
    """

    def __init__(
        self,
        inbox: Inbox,
        deadlines: Deadlines,
        queues: QueueTable,
        endings: Endings,
        observer: GuardedObserver,
        clock: Callable[[], float],
    ) -> None:
        self.carried: Mapping[RequestId, Cancelled] = {}
        self._inbox = inbox
        self._deadlines = deadlines
        self._queues = queues
        self._endings = endings
        self._observer = observer
        self._clock = clock

    def sweep(self) -> None:
        """Drop who was cancelled, or is too late, since the last time."""
        arrived = self._inbox.take_cancelled() + self._too_late()
        if not arrived and not self.carried:
            return
        begin = self._clock()
        sweep = collect(arrived, self.carried, self._queues)
        self.carried = sweep.carried
        for request_id in sweep.carried:
            self._leave(request_id)
        end, on_cancel = self._endings.end, self._observer.on_cancel
        for request, entry in sweep.due:
            state = request.state
            if state is None:
                continue
            request.swept = entry
            if entry.error is not None:
                end(request, finish(request, "error", error=entry.error))
                continue
            wasted = request.forwarded_tokens - entry.forwarded_tokens
            on_cancel(request, state, wasted if wasted > 0 else 0)
            end(request, finish(request, "abort"))
        if sweep.due:
            self._observer.on_sweep(self._clock() - begin, len(sweep.due))

    def _leave(self, request_id: RequestId) -> None:
        """Nothing more is launched for it, and what was launched ahead need not be run."""
        request = self._queues.get(request_id)
        if request is not None:
            request.leaving = True
            if request.flying > 1 and request.row is not None:
                request.row.dropped = True

    def _too_late(self) -> list[Cancelled]:
        if not self._deadlines:
            return []
        error = GenerationTimeout("the request was not finished by its deadline")
        late = self._deadlines.expired(self._clock())
        return [Cancelled(request_id, 0, error) for request_id in late]
