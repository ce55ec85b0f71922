"""The one way out of the scheduler: release everything a request holds, then one terminal event."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from qwen3_asgi.scheduler.admission import give_back
from qwen3_asgi.scheduler.effects import finish
from qwen3_asgi.scheduler.events import Event, Finish
from qwen3_asgi.scheduler.forks import stop_riders

if TYPE_CHECKING:
    from qwen3_asgi.scheduler.blocks import BlockPool
    from qwen3_asgi.scheduler.executor import ModelExecutor
    from qwen3_asgi.scheduler.loading import Loading
    from qwen3_asgi.scheduler.observer import GuardedObserver
    from qwen3_asgi.scheduler.queues import QueueTable
    from qwen3_asgi.scheduler.request import Request

logger = logging.getLogger(__name__)

_new = tuple.__new__


class Endings:
    """Owned by the scheduler thread. `events` collects the terminal events and all others."""

    def __init__(
        self,
        queues: QueueTable,
        pool: BlockPool,
        executor: ModelExecutor,
        observer: GuardedObserver,
        loading: Loading | None,
    ) -> None:
        self.events: list[Event] = []
        self.num_finished = 0
        self._queues = queues
        self._pool = pool
        self._executor = executor
        self._observer = observer
        self._loading = loading

    def refuse(self, request: Request, error: Exception) -> None:
        """End a request that never was in a queue."""
        request.finished = True
        end = finish(request, "error", error=error)
        self._observer.on_finish(request, end)
        self.events.append(Event(request.id, None, end))

    def fail(self, request: Request, error: Exception) -> None:
        """End a request whose step failed."""
        # What a failed step wrote is not to be trusted, so it must not serve anybody's prefix.
        self.end(request, finish(request, "error", error=error), discard=True)

    def end(
        self, request: Request, end: Finish, event: Event | None = None, *, discard: bool = False
    ) -> None:
        if request.finished:
            return
        request.finished = True
        request.riding = False
        if request.forks:
            stop_riders(request, self._queues)
        self._queues.remove(request)
        if request.flying:
            self._linger(request)
        try:
            if request.admitted and not request.flying:
                self._drop(request)
        finally:  # also when the executor ends the loop: nobody else knows this request any more
            if request.load is not None and self._loading is not None:
                self._loading.abandon(request)
            if discard:
                self._pool.discard(request.blocks)
                request.blocks = []
            elif request.blocks:
                give_back(request, self._pool)
            self.events.append(event or _new(Event, (request.id, None, end)))
            self.num_finished += 1
        self._observer.on_finish(request, end)

    def let_go(self, request: Request) -> None:
        """The last step that carried a request has landed, after its end."""
        self._pool.settle(request.lingering)
        request.lingering = []
        self._queues.settle(request)
        self._drop(request)

    def _drop(self, request: Request) -> None:
        try:
            self._executor.drop_request(request.id)
        except Exception:
            logger.exception("dropping request %s failed in the executor", request.id)

    def _linger(self, request: Request) -> None:
        """It ends while a step that was launched ahead carries it: what that one uses stays."""
        if request.row is not None:
            request.row.dropped = True
        request.lingering = request.blocks
        self._pool.linger(request.blocks)
        self._queues.linger(request)
