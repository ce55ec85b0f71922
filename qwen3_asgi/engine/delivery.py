"""The scheduler's `EventSink`: a step's events into mailboxes, one wake-up per event loop.

The scheduler thread never waits for a reader here. A loop that is closed with live requests has
them cancelled, and disturbs nobody.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from concurrent.futures import Future, InvalidStateError
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from qwen3_asgi.engine.outbox import LoopOutbox
from qwen3_asgi.engine.portal import LoopClosed, LoopPortal

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from qwen3_asgi.engine.mailbox import Mailbox
    from qwen3_asgi.engine.outbox import Outbox
    from qwen3_asgi.scheduler.events import Event
    from qwen3_asgi.scheduler.plan import RequestId

logger = logging.getLogger(__name__)


class Delivery:
    """The mailboxes of one engine. `register` and `when_idle` from any thread, `deliver` from the
    scheduler thread."""

    def __init__(self, on_wakeups: Callable[[int], None]) -> None:
        self._on_wakeups = on_wakeups
        self._mailboxes: dict[RequestId, Mailbox] = {}
        # Taken by submitters only, never by the scheduler thread.
        self._lock = threading.Lock()
        # Prompt tokens that came in, and those that are computed or not needed any more: each is
        # written on one side only, so the scheduler thread need not take the lock.
        self._tokens_in = 0
        self._tokens_done = 0
        # An outbox refers to its loop; held weakly here, so that no loop outlives its requests.
        self._outboxes: WeakValueDictionary[object, LoopOutbox] = WeakValueDictionary()
        self._idle: Future[None] | None = None
        self._silent = False

    def __len__(self) -> int:
        """Live requests, including those that the scheduler has not drained yet."""
        return len(self._mailboxes)

    @property
    def unprefilled_tokens(self) -> int:
        """Prompt tokens of live requests that have no token yet."""
        return self._tokens_in - self._tokens_done

    def outbox_here(self) -> LoopOutbox:
        """The outbox of the running event loop."""
        portal = LoopPortal.current()
        with self._lock:
            outbox = self._outboxes.get(portal.native)
            if outbox is None:
                outbox = self._outboxes[portal.native] = LoopOutbox(portal)
            return outbox

    def register(
        self, *mailboxes: Mailbox, check: Callable[[int, int], None] | None = None
    ) -> None:
        """All of them, before their requests are submitted.

        `check` gets the numbers of live requests and of their unprefilled tokens; no other
        submitter comes between it and the registration. If it raises, nothing is registered.
        """
        with self._lock:
            if check is not None:
                check(len(self._mailboxes), self.unprefilled_tokens)
            for mailbox in mailboxes:
                self._mailboxes[mailbox.request_id] = mailbox
                self._tokens_in += mailbox.unprefilled

    def forget(self, *mailboxes: Mailbox) -> None:
        """Their requests were never submitted."""
        with self._lock:
            for mailbox in mailboxes:
                if self._mailboxes.pop(mailbox.request_id, None) is not None:
                    self._tokens_in -= mailbox.unprefilled
        self._answer_idle()

    def when_idle(self) -> Future[None]:
        """Completes once no request is live."""
        future = self._idle
        if future is None or future.done():
            future = self._idle = Future()
        self._answer_idle()
        return future

    def fail_all(self, error: Exception) -> None:
        """Make every reader raise `error`. In the child of a fork, where no event will come.

        Event loops are not woken: theirs would be the parent's.
        """
        for mailbox in self._mailboxes.copy().values():
            mailbox.failure = mailbox.failure or error
            mailbox.outbox.ring(mailbox)

    def silence(self) -> None:
        """Deliver nothing more; at the exit of the process."""
        self._silent = True

    def deliver(self, events: Sequence[Event]) -> None:
        if self._silent:
            return
        touched: dict[Outbox, None] = {}
        for event in events:
            mailbox = self._mailboxes.get(event.request_id)
            if mailbox is None:
                continue
            mailbox.push(event)
            if mailbox.unprefilled:
                self._tokens_done += mailbox.unprefilled
                mailbox.unprefilled = 0
            mailbox.outbox.ring(mailbox)
            touched[mailbox.outbox] = None
            if event.finish is not None:
                del self._mailboxes[event.request_id]
        wakeups = 0
        for outbox in touched:
            try:
                wakeups += outbox.flush()
            except LoopClosed:
                self._abandon(outbox)
        if wakeups:
            self._on_wakeups(wakeups)
        self._answer_idle()

    def _abandon(self, outbox: Outbox) -> None:
        # `copy` is one step: other threads register meanwhile.
        orphans = [m for m in self._mailboxes.copy().values() if m.outbox is outbox]
        if orphans:
            logger.warning("an event loop closed with %d live requests", len(orphans))
        for mailbox in orphans:
            mailbox.cancel()

    def _answer_idle(self) -> None:
        idle = self._idle
        if idle is not None and not self._mailboxes and not idle.done():
            with contextlib.suppress(InvalidStateError):  # another thread was faster
                idle.set_result(None)
