"""Per-request deadlines: who is too late now, without looking at everybody."""

from __future__ import annotations

from heapq import heappop, heappush
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from qwen3_asgi.scheduler.plan import RequestId
    from qwen3_asgi.scheduler.queues import QueueTable
    from qwen3_asgi.scheduler.request import Request


class Deadlines:
    """A heap; those that have ended meanwhile are skipped as they come up."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, RequestId]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, request: Request) -> None:
        if request.deadline is not None:
            heappush(self._heap, (request.deadline, request.id))

    def expired(self, now: float) -> list[RequestId]:
        """Each once."""
        late: list[RequestId] = []
        while self._heap and self._heap[0][0] <= now:
            late.append(heappop(self._heap)[1])
        return late

    def next(self, queues: QueueTable) -> float | None:
        """When the next live request is too late."""
        while self._heap and queues.get(self._heap[0][1]) is None:
            heappop(self._heap)
        return self._heap[0][0] if self._heap else None
