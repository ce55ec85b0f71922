"""One table of queues, one per state: every live request is in exactly one of them.

Queues keep their order, and a request is found and removed by id in O(1), whatever waits around it.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from qwen3_asgi.scheduler.request import RUNNING_STATES, WAITING_STATES, Request, State

if TYPE_CHECKING:
    from collections.abc import Iterator

    from qwen3_asgi.scheduler.plan import RequestId

# `inflight` is not swept: its KV is being written and its entry is paired with the running result.
SWEPT_STATES = frozenset(State) - {State.INFLIGHT}


class QueueTable:
    """Owned by the scheduler thread, but for `get`, which any thread may call."""

    def __init__(self) -> None:
        self._queues: dict[State, OrderedDict[RequestId, Request]] = {
            state: OrderedDict() for state in State
        }
        self._live: dict[RequestId, Request] = {}

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._live.values())

    def __getitem__(self, state: State) -> OrderedDict[RequestId, Request]:
        return self._queues[state]

    def get(self, request_id: RequestId) -> Request | None:
        return self._live.get(request_id)

    def put(self, request: Request, state: State, *, front: bool = False) -> None:
        """Move a request (or a new one) into a queue."""
        if request.state is not None:
            del self._queues[request.state][request.id]
        self._live[request.id] = request
        request.state = state
        queue = self._queues[state]
        queue[request.id] = request
        if front:
            queue.move_to_end(request.id, last=False)

    def remove(self, request: Request) -> None:
        """Take a request out of the table; it is no longer live."""
        if request.state is not None:
            del self._queues[request.state][request.id]
        del self._live[request.id]
        request.state = None

    @property
    def num_waiting(self) -> int:
        return sum(len(self._queues[state]) for state in WAITING_STATES)

    @property
    def num_running(self) -> int:
        return sum(len(self._queues[state]) for state in RUNNING_STATES)
