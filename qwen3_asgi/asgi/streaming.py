"""A response of server-sent events as pure ASGI: start, frames, keep-alive comments, end.

Not Starlette's `StreamingResponse`, whose watch for a disconnect depends on the server's ASGI
version; the disconnect is `DisconnectWatch`'s business.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio

from qwen3_asgi.asgi.responses import raw_headers
from qwen3_asgi.asgi.sse import KEEP_ALIVE

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from starlette.types import Send

DEFAULT_KEEP_ALIVE_SECONDS = 15.0

_HEADERS = raw_headers(
    {
        "content-type": "text/event-stream; charset=utf-8",
        "cache-control": "no-cache",
        # nginx would collect the whole answer before it passes anything on.
        "x-accel-buffering": "no",
    }
)


class EventStream:
    """One response. `send_frames` may be called from several tasks; frames never interleave."""

    def __init__(self, send: Send, *, keep_alive_seconds: float) -> None:
        self._send = send
        self._keep_alive_seconds = keep_alive_seconds
        self._lock = anyio.Lock()
        self._last_sent = 0.0
        self._ended = False

    async def run(self, produce: Callable[[], Awaitable[None]]) -> None:
        """Start the response, then run `produce`, commenting while it is silent.

        What `produce` raises is raised as it is.
        """
        await self._send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        self._last_sent = anyio.current_time()
        await run_together([produce], background=self._keep_alive)

    async def send_frames(self, frames: Sequence[bytes]) -> None:
        if frames:
            await self._write(b"".join(frames), more_body=True)

    async def end(self, frame: bytes) -> None:
        """Send the last frame and complete the response."""
        await self._write(frame, more_body=False)

    async def _write(self, body: bytes, *, more_body: bool) -> None:
        async with self._lock:
            self._ended = self._ended or not more_body
            await self._send({"type": "http.response.body", "body": body, "more_body": more_body})
            self._last_sent = anyio.current_time()

    async def _keep_alive(self) -> None:
        while not self._ended:
            due = self._last_sent + self._keep_alive_seconds
            if anyio.current_time() < due:
                await anyio.sleep_until(due)
                continue
            # The last frame waits for this lock: a comment is never cut off in the middle.
            async with self._lock:
                if not self._ended:
                    await self._send(
                        {"type": "http.response.body", "body": KEEP_ALIVE, "more_body": True}
                    )
                    self._last_sent = anyio.current_time()


async def run_together(
    calls: Sequence[Callable[[], Awaitable[None]]],
    *,
    background: Callable[[], Awaitable[None]] | None = None,
) -> None:
    """Run calls at the same time; `background` ends with them.

    The first error cancels the rest and is raised bare, never in an exception group: callers and
    hosts catch our typed errors by their type.
    """
    if len(calls) == 1 and background is None:
        await calls[0]()
        return
    failures: list[Exception] = []

    async with anyio.create_task_group() as group:

        async def guarded(call: Callable[[], Awaitable[None]]) -> None:
            try:
                await call()
            except Exception as error:
                failures.append(error)
                group.cancel_scope.cancel()

        if background is not None:
            group.start_soon(guarded, background)
        if len(calls) == 1:
            await guarded(calls[0])
        else:
            async with anyio.create_task_group() as foreground:
                for call in calls:
                    foreground.start_soon(guarded, call)
        group.cancel_scope.cancel()
    if failures:
        try:
            raise failures[0]
        finally:
            failures.clear()  # an error that its own traceback's frame holds is a reference cycle
