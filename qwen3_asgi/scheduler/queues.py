"""One table of queues, one per state: every live request is in exactly one of them.

Queues keep their order, and a request is found and removed by id in O(1), whatever waits around it.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter, OrderedDict
from typing import TYPE_CHECKING

from qwen3_asgi.scheduler.request import RUNNING_STATES, WAITING_STATES, Request, State

if TYPE_CHECKING:
    from collections.abc import Iterator

    from qwen3_asgi.scheduler.plan import RequestId

# `inflight` is not swept: its KV is being written and its entry is paired with the running result.
SWEPT_STATES = frozenset(State) - {State.INFLIGHT}
_NO_USERS = frozenset({None, State.POST_CONTROL_DEFERRED})
_WAITING = frozenset(WAITING_STATES)


class Queue:
    """Requests of one state: the lowest `priority` first, then in order of arrival here."""

    __slots__ = ("_bands", "_length", "_priorities")

    def __init__(self) -> None:
        # Almost always one band: priorities are few.
        self._bands: dict[int, OrderedDict[RequestId, Request]] = {}
        self._priorities: list[int] = []
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Request]:
        for priority in self._priorities:
            yield from self._bands[priority].values()

    def add(self, request: Request, *, front: bool = False) -> None:
        """At the end of its priority, or at the front of it."""
        band = self._bands.get(request.priority)
        if band is None:
            band = self._bands[request.priority] = OrderedDict()
            insort(self._priorities, request.priority)
        band[request.id] = request
        if front:
            band.move_to_end(request.id, last=False)
        self._length += 1

    def discard(self, request: Request) -> None:
        band = self._bands[request.priority]
        del band[request.id]
        self._length -= 1
        if not band and len(self._priorities) > 1:
            del self._bands[request.priority]
            self._priorities.remove(request.priority)


class QueueTable:
    """Owned by the scheduler thread, but for `get`, which any thread may call."""

    def __init__(self) -> None:
        self._queues = {state: Queue() for state in State}
        self._live: dict[RequestId, Request] = {}
        # Live requests by adapter; those that wait for a control command are not counted.
        self._users: Counter[str | None] = Counter()
        # Those that have ended while a step carries them.
        self.num_lingering = 0
        self.waiting_tokens = 0

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._live.values())

    def __getitem__(self, state: State) -> Queue:
        return self._queues[state]

    def get(self, request_id: RequestId) -> Request | None:
        return self._live.get(request_id)

    def put(self, request: Request, state: State, *, front: bool = False) -> None:
        """Move a request (or a new one) into a queue."""
        before = request.state
        if before is None:
            self._live[request.id] = request
        else:
            self._queues[before].discard(request)
        if before in _NO_USERS and state not in _NO_USERS:
            self._users[request.adapter] += 1
        if before in _WAITING:
            self.waiting_tokens -= len(request.token_ids)
        if state in _WAITING:
            self.waiting_tokens += len(request.token_ids)
        request.state = state
        self._queues[state].add(request, front=front)

    def remove(self, request: Request) -> None:
        """Take a request out of the table; it is no longer live."""
        state = request.state
        if state is not None:
            self._queues[state].discard(request)
            if state is not State.POST_CONTROL_DEFERRED:
                self._users[request.adapter] -= 1
            if state in _WAITING:
                self.waiting_tokens -= len(request.token_ids)
        del self._live[request.id]
        request.state = None

    def linger(self, request: Request) -> None:
        """It was removed while a step carries it: that step still needs its adapter."""
        self._users[request.adapter] += 1
        self.num_lingering += 1

    def settle(self, request: Request) -> None:
        self._users[request.adapter] -= 1
        self.num_lingering -= 1

    def users_of(self, adapter: str) -> int:
        """Requests that use an adapter, without those held back in `post_control_deferred`."""
        return self._users[adapter]

    @property
    def num_waiting(self) -> int:
        return sum(len(self._queues[state]) for state in WAITING_STATES)

    @property
    def num_running(self) -> int:
        return sum(len(self._queues[state]) for state in RUNNING_STATES)
