"""Threads for short blocking work, apart from the event loop's default ones.

Those the host's own blocking endpoints may have taken, waiting for the very thing that we would do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import anyio
import anyio.to_thread
from anyio.lowlevel import RunVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


class ThreadLimit:
    """At most `threads` at a time on each event loop."""

    def __init__(self, name: str, threads: int) -> None:
        self._threads = threads
        self._limiter: RunVar[anyio.CapacityLimiter] = RunVar(name)

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        """Run a blocking function in a thread."""
        try:
            limiter = self._limiter.get()
        except LookupError:
            limiter = anyio.CapacityLimiter(self._threads)
            self._limiter.set(limiter)
        return await anyio.to_thread.run_sync(function, *args, limiter=limiter)
