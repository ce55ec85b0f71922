"""What must hold when a test is over: nothing live, nothing held, nothing left running."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import anyio
from anyio import get_running_tasks

from qwen3_asgi.engine.portal import in_event_loop

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from qwen3_asgi.engine.engine import Engine

POLL_SECONDS = 0.001
# Threads that a pool keeps for its next use.
POOLED = ("AnyIO worker thread", "Trio thread", "ThreadPoolExecutor", "asyncio_")


def assert_idle(engine: Engine, *, timeout: float = 5.0) -> None:
    """Wait until nothing is live, then check that nothing was left behind.

    It blocks its thread. On an event loop use `assert_idle_async`, or what must happen there first
    (a disconnect that is to be noticed) can't.

    Raises:
        AssertionError: requests or KV blocks are still held after `timeout` seconds.
    """
    _wait(lambda: _left(engine), timeout)


async def assert_idle_async(engine: Engine, *, timeout: float = 5.0) -> None:  # noqa: ASYNC109
    """`assert_idle` for event loops: the app goes on meanwhile."""
    await _wait_async(lambda: _left(engine), timeout)


class assert_no_leaks:
    """Around (a part of) a test: `with assert_no_leaks(engine):`, or `async with` on a loop.

    At the end the engines must be idle, and threads and (`async with`) tasks of this event loop
    that were not there at the beginning must be gone; all of them get `timeout` seconds for it.
    Threads that wait in a pool are no leak.

    Raises:
        AssertionError: with the names of what is left. Not if the block itself has raised.
    """

    def __init__(self, *engines: Engine, timeout: float = 5.0) -> None:
        self._engines = engines
        self._timeout = timeout
        self._threads: set[threading.Thread] = set()
        self._tasks: set[int] = set()

    def __enter__(self) -> None:
        self._threads = set(threading.enumerate())

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            _wait(self._left, self._timeout)

    async def __aenter__(self) -> None:
        self.__enter__()
        self._tasks = {task.id for task in get_running_tasks()}

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            await _wait_async(lambda: self._left() + self._left_tasks(), self._timeout)

    def _left(self) -> list[str]:
        threads = [
            f"thread {thread.name!r}"
            for thread in threading.enumerate()
            if thread not in self._threads and not thread.name.startswith(POOLED)
        ]
        return threads + [what for engine in self._engines for what in _left(engine)]

    def _left_tasks(self) -> list[str]:
        return [f"task {task.name!r}" for task in get_running_tasks() if task.id not in self._tasks]


def _left(engine: Engine) -> list[str]:
    """Not `load` alone: it does not show what the scheduler has not taken from its inbox yet."""
    live, load = engine.live_requests, engine.load()
    if live == 0 and load.idle and load.kv_used_blocks == 0:
        return []
    return [f"{live} live requests, {load}"]


def _wait(left: Callable[[], list[str]], timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while still := left():
        if time.monotonic() > deadline:
            hint = "; the event loop was blocked meanwhile" if in_event_loop() else ""
            raise AssertionError(f"left after {timeout:g} s: {', '.join(still)}{hint}")
        time.sleep(POLL_SECONDS)


async def _wait_async(left: Callable[[], list[str]], timeout: float) -> None:  # noqa: ASYNC109
    deadline = time.monotonic() + timeout
    while still := left():
        if time.monotonic() > deadline:
            raise AssertionError(f"left after {timeout:g} s: {', '.join(still)}")
        await anyio.sleep(POLL_SECONDS)
