"""Reports a step that runs too long: a log line with the stacks of the threads, and a count.

The scheduler's loop knows nothing of it. While no request is live its thread sleeps without a
timeout; while there are some it looks once in `warn_seconds`, which misses no step that is longer.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
import traceback
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from qwen3_asgi.engine.delivery import Delivery
    from qwen3_asgi.scheduler.loop import Scheduler

logger = logging.getLogger(__name__)


class Watchdog:
    """Started and stopped by the scheduler thread; `notice` and `stalled_seconds` from any.

    Args:
        warn_seconds: None: nothing is ever reported, and there is no thread.
        on_stall: called once for each step that takes longer.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        delivery: Delivery,
        warn_seconds: float | None,
        on_stall: Callable[[], None],
        *,
        name: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._scheduler = scheduler
        self._delivery = delivery
        self._warn_seconds = warn_seconds
        self._on_stall = on_stall
        self._name = name
        self._clock = clock
        self._news = threading.Event()
        self._ended = threading.Event()
        self._reported: float | None = None  # when the step was begun that was reported last
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """On the thread that runs the steps, whose stack is reported."""
        if self._warn_seconds is None:
            return
        self._thread = threading.Thread(
            target=self._run,
            args=(self._warn_seconds, threading.get_ident()),
            name=f"qwen3-asgi {self._name} watchdog",
            daemon=True,
        )
        try:
            self._thread.start()
        except RuntimeError:  # no thread is left; generating is worth more than watching it
            logger.exception("engine %s runs without its watchdog", self._name)
            self._thread = None

    def stop(self) -> None:
        """End the thread and wait for it."""
        if self._thread is not None:
            self._ended.set()
            self._news.set()
            self._thread.join()
            self._thread = None

    def notice(self) -> None:
        """A request has been registered with the delivery: something may run now."""
        if not self._news.is_set():
            self._news.set()

    @property
    def stalled_seconds(self) -> float | None:
        """How long a step has been running, if that is longer than `warn_seconds`."""
        since = self._scheduler.running_since
        if since is None or self._warn_seconds is None:
            return None
        seconds = self._clock() - since
        return seconds if seconds >= self._warn_seconds else None

    def look(self, warn_seconds: float, ident: int) -> float:
        """Report what has to be reported; returns when to look again, in seconds from now."""
        since = self._scheduler.running_since
        if since is None or since == self._reported:
            return warn_seconds
        seconds = self._clock() - since
        if seconds < warn_seconds:
            return warn_seconds - seconds
        self._reported = since
        logger.warning(
            "engine %s: a step has been running for %.1f s\n%s", self._name, seconds, _stacks(ident)
        )
        self._on_stall()
        return warn_seconds

    def _run(self, warn_seconds: float, ident: int) -> None:
        while not self._ended.is_set():
            # First the flag, then the look: who registers after the look sets it again.
            self._news.clear()
            if self._ended.is_set():
                return
            if len(self._delivery):
                self._ended.wait(self.look(warn_seconds, ident))
            else:
                self._news.wait()


def _stacks(ident: int) -> str:
    """Of the scheduler thread, and of the lanes, which run its steps with overlap."""
    names = {
        thread.ident: thread.name
        for thread in threading.enumerate()
        if thread.ident == ident or thread.name.endswith(" lane")
    }
    return "\n".join(f"{name}:\n{_stack(thread)}" for thread, name in names.items())


def _stack(ident: int | None) -> str:
    # Not kept in a variable: what holds all frames holds our own, and that for as long as it likes.
    frame = sys._current_frames().get(ident or 0)
    return "" if frame is None else "".join(traceback.format_stack(frame)).rstrip()
