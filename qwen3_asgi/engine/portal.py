"""From any thread into an event loop without blocking. The only file that knows native loops."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import anyio
from anyio.lowlevel import current_token

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

T = TypeVar("T")


class LoopClosed(RuntimeError):
    """The event loop does not run callbacks any more."""


class LoopPortal:
    """One running event loop (asyncio or trio), as seen from other threads."""

    __slots__ = ("_call_soon", "native")

    def __init__(self, native: Any) -> None:
        self.native = native
        # asyncio's loop or trio's token; `anyio.from_thread` would block the calling thread.
        self._call_soon: Callable[..., object] = (
            native.call_soon_threadsafe
            if hasattr(native, "call_soon_threadsafe")
            else native.run_sync_soon
        )

    @classmethod
    def current(cls) -> LoopPortal:
        """The loop of the running task.

        Raises:
            anyio.NoEventLoopError: this thread runs no event loop.
        """
        return cls(current_token().native_token)

    @property
    def is_here(self) -> bool:
        """Whether the calling code runs in this loop."""
        return in_event_loop() and current_token().native_token is self.native

    def call_soon(self, function: Callable[[], object]) -> None:
        """Run `function` in the loop, soon. Returns at once.

        Raises:
            LoopClosed: it will never run.
        """
        try:
            self._call_soon(function)
        except RuntimeError as error:  # asyncio: loop closed; trio: RunFinishedError
            raise LoopClosed(str(error)) from error


def in_event_loop() -> bool:
    """Whether the calling thread is running an event loop right now."""
    try:
        current_token()
    except RuntimeError:
        return False
    return True


async def wait_future(future: Future[T]) -> T:
    """Await a future that another thread completes, without a thread that waits for it."""
    if not future.done():
        portal = LoopPortal.current()
        done = anyio.Event()

        def wake(_: Future[T]) -> None:
            try:
                portal.call_soon(done.set)
            except LoopClosed:
                return  # nobody is left to wake

        future.add_done_callback(wake)
        await done.wait()
    return future.result()
