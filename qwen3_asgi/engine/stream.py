"""What `Engine.stream` returns: deltas of one generation, cancelled as soon as it is dropped.

A class and not an async generator: an abandoned generator is closed by the event loop some time
later, or not at all; this is freed with its last reference, and its request is cancelled then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from qwen3_asgi.engine.handle import RequestHandle
    from qwen3_asgi.engine.output import Collector, Delta


class DeltaStream:
    """An async iterator of `Delta`. The request is submitted by the first read.

    Raises while iterating: as `Engine.submit`, and as reading a `RequestHandle`.
    """

    def __init__(
        self, submit: Callable[[], Awaitable[RequestHandle]], collect: Callable[[], Collector]
    ) -> None:
        self._submit = submit
        self._collect = collect
        self._handle: RequestHandle | None = None
        self._collector: Collector | None = None
        self._closed = False

    def __aiter__(self) -> DeltaStream:
        return self

    async def __anext__(self) -> Delta:
        if self._closed:
            raise StopAsyncIteration
        try:
            if self._handle is None or self._collector is None:
                self._handle = await self._submit()
                self._collector = self._collect()
            return self._collector.add(await anext(self._handle))
        except BaseException:  # also the end, and the cancellation of the reading task
            self.cancel()
            raise

    def cancel(self) -> None:
        """Cancel the request. Idempotent; from any thread; returns at once."""
        self._closed = True
        if self._handle is not None:
            self._handle.cancel()

    async def aclose(self) -> None:
        """`cancel`, for `contextlib.aclosing`."""
        self.cancel()
