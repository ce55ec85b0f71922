"""From any thread into an event loop without blocking. The only file that knows native loops."""

from __future__ import annotations

import contextlib
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

    __slots__ = ("_call_soon", "_is_closed", "native")

    def __init__(self, native: Any) -> None:
        self.native = native
        # asyncio's loop or trio's token; `anyio.from_thread` would block the calling thread.
        self._call_soon: Callable[..., object] = (
            native.call_soon_threadsafe
            if hasattr(native, "call_soon_threadsafe")
            else native.run_sync_soon
        )
        self._is_closed: Callable[[], bool] = getattr(native, "is_closed", bool)

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
        try:
            return current_token().native_token is self.native
        except RuntimeError:
            return False

    @property
    def is_closed(self) -> bool:
        """Whether pending calls are lost. Trio runs those it has accepted, so there it is false."""
        return bool(self._is_closed())

    def call_soon(self, function: Callable[[], object]) -> None:
        """Run `function` in the loop, soon. Returns at once.

        Raises:
            LoopClosed: it will never run.
        """
        try:
            self._call_soon(function)
        except RuntimeError as error:  # asyncio: loop closed; trio: RunFinishedError
            raise LoopClosed(str(error)) from error

    def call_soon_in_task(self, function: Callable[[], object]) -> None:
        """As `call_soon`, for what makes scopes or tasks: anyio cannot in a bare asyncio callback.

        Raises:
            LoopClosed: it will never run.
        """
        create_task = getattr(self.native, "create_task", None)
        if create_task is None:  # trio
            self.call_soon(function)
        else:
            self.call_soon(lambda: create_task(_call(function)))


async def _call(function: Callable[[], object]) -> None:
    function()


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
        done = anyio.Event()
        waiter: tuple[LoopPortal, anyio.Event] | None = (LoopPortal.current(), done)

        def wake(_: Future[T]) -> None:
            if waiter is not None:
                portal, event = waiter
                with contextlib.suppress(LoopClosed):  # nobody is left to wake
                    portal.call_soon(event.set)

        future.add_done_callback(wake)
        try:
            await done.wait()
        finally:
            waiter = None  # a future keeps its callbacks, and this one would keep the loop
    return future.result()
