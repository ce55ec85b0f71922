"""From any thread into an event loop without blocking. The only file that knows native loops."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from contextvars import copy_context
from typing import TYPE_CHECKING, Any, TypeVar

import anyio

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
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
        self._call_soon: Callable[[Callable[[], object]], object] = (
            native.call_soon_threadsafe
            if hasattr(native, "call_soon_threadsafe")
            # asyncio's runs the callback in the caller's context by itself.
            else lambda function: native.run_sync_soon(copy_context().run, function)
        )
        self._is_closed: Callable[[], bool] = getattr(native, "is_closed", bool)

    @classmethod
    def current(cls) -> LoopPortal:
        """The loop that runs in this thread.

        Raises:
            RuntimeError: this thread runs no event loop.
        """
        native = _running_loop()
        if native is None:
            raise RuntimeError("no asyncio or trio event loop is running in this thread")
        return cls(native)

    @property
    def is_here(self) -> bool:
        """Whether the calling code runs in this loop."""
        return _running_loop() is self.native

    @property
    def is_closed(self) -> bool:
        """Whether pending calls are lost. Trio runs those it has accepted, so there it is false."""
        return bool(self._is_closed())

    def call_soon(self, function: Callable[[], object]) -> None:
        """Run `function` in the loop, soon, in the caller's context. Returns at once.

        Raises:
            LoopClosed: it will never run.
        """
        try:
            self._call_soon(function)
        except RuntimeError as error:  # asyncio: loop closed; trio: RunFinishedError
            raise LoopClosed(str(error)) from error

    def call_next(self, function: Callable[[], object]) -> None:
        """`call_soon` for callers in this loop: in its next turn, after what else is due.

        Raises:
            LoopClosed: it will never run.
        """
        call_next = getattr(self.native, "call_soon", None)  # no need to wake who is awake
        if call_next is None:
            self.call_soon(function)
            return
        try:
            call_next(function)
        except RuntimeError as error:
            raise LoopClosed(str(error)) from error

    def spawn(self, function: Callable[[], Coroutine[Any, Any, None]]) -> object:
        """Run `function` as a task that nobody waits for; it must not raise. In this loop only.

        Keep what is returned as long as the task runs: asyncio itself does not.
        """
        create_task = getattr(self.native, "create_task", None)
        if create_task is not None:
            return create_task(function())
        lowlevel = sys.modules["trio"].lowlevel
        task: object = lowlevel.spawn_system_task(function, context=copy_context())
        return task


def in_event_loop() -> bool:
    """Whether the calling thread is running an event loop right now."""
    return _running_loop() is not None


def check_thread() -> None:
    """
    Raises:
        RuntimeError: called on an event loop, which whoever asks would block.
    """
    if in_event_loop():
        raise RuntimeError("this would block the event loop; await the async method instead")


def _running_loop() -> object | None:
    """asyncio's loop or trio's token, as `anyio.lowlevel.current_token` but at a tenth of the cost,
    and in bare asyncio callbacks, too."""
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        return _running_trio()
    if asyncio.current_task(loop) is None:  # a bare callback, or trio as a guest of this loop
        return _running_trio() or loop
    return loop


def _running_trio() -> object | None:
    # Nothing runs in a trio that another thread is just importing.
    trio = sys.modules.get("trio")
    if trio is None or not hasattr(trio, "lowlevel"):
        return None
    try:
        token: object = trio.lowlevel.current_trio_token()
    except RuntimeError:
        return None
    return token


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
