"""Where mailboxes are rung: per event loop, woken once per step, or per waiting thread."""

from __future__ import annotations

from collections import deque
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Protocol

import anyio

from qwen3_asgi.engine.portal import LoopClosed

if TYPE_CHECKING:
    from collections.abc import Callable

    from qwen3_asgi.engine.mailbox import Mailbox
    from qwen3_asgi.engine.portal import LoopPortal


# Readers woken in one turn of their loop. With all of a step's at once the loop would be deaf to
# everybody else until the last of them has sent its event.
READERS_PER_TURN = 8


class Outbox(Protocol):
    """Rings mailboxes. `ring` and `flush` may be called by any thread and never block."""

    def ring(self, mailbox: Mailbox) -> None:
        """Note that this mailbox has news."""
        ...

    def ring_now(self, mailbox: Mailbox) -> None:
        """`ring` and `flush` for one that must not wait for its turn.

        Raises:
            LoopClosed: the readers' loop has ended.
        """
        ...

    def flush(self) -> bool:
        """Wake whoever reads the noted mailboxes; returns whether a wake-up was needed.

        Raises:
            LoopClosed: the readers' loop has ended.
        """
        ...


class LoopOutbox:
    """The mailboxes read on one event loop: one wake-up per step, however many of them ring."""

    def __init__(self, portal: LoopPortal) -> None:
        self.portal = portal
        self._rung: deque[Mailbox] = deque()
        self._scheduled = False

    def ring(self, mailbox: Mailbox) -> None:
        self._rung.append(mailbox)

    def ring_now(self, mailbox: Mailbox) -> None:
        # Before anybody else hears of the disconnect that we are told of in this turn: Starlette's
        # streams cancel themselves then, and the handler would not see why.
        if self.portal.is_here:
            mailbox.wake()
        else:
            self.ring(mailbox)
            self.flush()

    def flush(self) -> bool:
        if self._scheduled:
            # A loop that closes with a wake-up pending never runs it.
            if self.portal.is_closed:
                raise LoopClosed("the event loop is closed")
            return False
        if not self._rung:
            return False
        self._scheduled = True
        try:
            self.portal.call_soon(self._wake_readers)
        except LoopClosed:
            self._scheduled = False  # the next flush must find out, too
            raise
        return True

    def _wake_readers(self) -> None:
        # First the flag, then the queue: what is rung from here on schedules the next wake-up.
        self._scheduled = False
        try:
            for _ in range(READERS_PER_TURN):
                self._rung.popleft().wake()
        except IndexError:
            return
        if self._rung and not self._scheduled:
            self._scheduled = True
            try:
                self.portal.call_next(self._wake_readers)
            except LoopClosed:
                self._scheduled = False  # the next flush must find out


class LoopBell:
    """Wakes the one task that waits for a mailbox. Used in the loop's own thread only."""

    __slots__ = ("_event",)

    def __init__(self) -> None:
        self._event: anyio.Event | None = None

    def ring(self) -> None:
        if self._event is not None:
            self._event.set()

    async def wait(self, is_ready: Callable[[], bool]) -> None:
        """Return once `is_ready()`; it is called again after each ring.

        Raises:
            RuntimeError: another task is waiting; it would never be woken.
        """
        if self._event is not None:
            raise RuntimeError("another task is reading this handle")
        # What makes it ready comes before the ring, and the ring comes in this thread: neither can
        # be missed between the look and the wait.
        while not is_ready():
            self._event = anyio.Event()
            try:
                await self._event.wait()
            finally:
                self._event = None


class ThreadOutbox:
    """One mailbox that a thread reads. `SimpleQueue.put` is re-entrant, so no ring can deadlock."""

    def __init__(self) -> None:
        self._rings: SimpleQueue[None] = SimpleQueue()

    def ring(self, mailbox: Mailbox) -> None:
        del mailbox
        self._rings.put(None)

    def ring_now(self, mailbox: Mailbox) -> None:
        self.ring(mailbox)

    def flush(self) -> bool:
        return False

    def wait(self, is_ready: Callable[[], bool]) -> None:
        """Block until `is_ready()`."""
        while not is_ready():
            self._rings.get()
            try:  # one look answers every ring that came meanwhile
                while True:
                    self._rings.get_nowait()
            except Empty:
                continue
