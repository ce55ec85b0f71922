"""One request's events between the scheduler thread and its reader.

The delivery holds mailboxes, the reader holds a handle: a handle that is dropped unread can thus be
noticed by its finalizer.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from qwen3_asgi.engine.outbox import LoopBell
from qwen3_asgi.engine.portal import LoopClosed

if TYPE_CHECKING:
    from collections.abc import Callable

    from qwen3_asgi.engine.outbox import Outbox
    from qwen3_asgi.scheduler.events import Event
    from qwen3_asgi.scheduler.plan import RequestId


class Mailbox:
    """Events in order. The scheduler thread appends, one reader takes.

    Bounded by the request itself: a reader that does not read gets everything in one batch later,
    and there is never more of it than the context holds tokens. Nobody else waits for it.
    """

    __slots__ = (
        "_cancel",
        "bell",
        "done",
        "events",
        "failure",
        "on_disconnect",
        "outbox",
        "request_id",
        "unprefilled",
    )

    def __init__(
        self,
        request_id: RequestId,
        outbox: Outbox,
        cancel: Callable[[RequestId], None],
        on_disconnect: Callable[[str], None],
        *,
        bell: LoopBell | None = None,
        unprefilled: int = 0,
    ) -> None:
        self.request_id = request_id
        self.outbox = outbox
        # One for all outputs of a request: whoever reads them waits for any.
        self.bell = bell or LoopBell()
        # Prompt tokens, until the first token comes; the delivery counts them.
        self.unprefilled = unprefilled
        self.events: deque[Event] = deque()
        self.on_disconnect = on_disconnect
        # Set by any thread: `failure` is what the reader gets instead of events, now and on every
        # later read; `done` says that the terminal event was appended.
        self.failure: Exception | None = None
        self.done = False
        self._cancel = cancel

    def push(self, event: Event) -> None:
        self.events.append(event)
        if event.finish is not None:
            self.done = True

    def cancel(self) -> None:
        """Cancel in the scheduler. Idempotent, any thread, never blocks."""
        if not self.done:
            self._cancel(self.request_id)

    def fail(self, error: Exception) -> None:
        """Cancel, and make the reader raise `error` at once instead of waiting for the sweep."""
        # Before the cancel: the abort that answers it must not reach the reader first.
        if self.failure is None:
            self.failure = error
        self.cancel()
        try:
            self.outbox.ring_now(self)
        except LoopClosed:
            return  # no reader is left

    def is_ready(self) -> bool:
        return bool(self.events) or self.failure is not None

    def wake(self) -> None:
        self.bell.ring()
