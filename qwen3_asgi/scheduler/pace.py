"""How fast requests finish, and from that: when it is worth asking again."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

WINDOW_SECONDS = 30.0
MIN_RETRY_SECONDS = 1.0
MAX_RETRY_SECONDS = 60.0


class Pace:
    """Finished requests of the last `WINDOW_SECONDS`. Owned by the scheduler thread.

    `rate` is in requests per second, as of the last that finished; 0.0 before there was one.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.rate = 0.0
        self._clock = clock
        self._finished: deque[tuple[float, int]] = deque()
        self._count = 0

    def note(self, count: int) -> None:
        """So many requests have finished."""
        if not count:
            return
        now = self._clock()
        self._finished.append((now, count))
        self._count += count
        while self._finished[0][0] < now - WINDOW_SECONDS:
            self._count -= self._finished.popleft()[1]
        # The first of the window opens it: what came with it is not known to have taken any time.
        begin, opening = self._finished[0]
        if now > begin:
            self.rate = (self._count - opening) / (now - begin)


def retry_after(num_waiting: int, rate: float) -> float:
    """Seconds until about half of those who wait now are served; within fixed bounds."""
    if rate <= 0.0:
        return MIN_RETRY_SECONDS if not num_waiting else MAX_RETRY_SECONDS / 2
    return min(MAX_RETRY_SECONDS, max(MIN_RETRY_SECONDS, num_waiting / 2 / rate))
