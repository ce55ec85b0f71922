"""Ties generations to the HTTP request or WebSocket that started them, across tasks and threads.

The ASGI watch sets a `RequestBinding` in a context variable; tasks and worker threads inherit it,
and every generation started under it is cancelled together when the client goes.
"""

from __future__ import annotations

import contextlib
import logging
from concurrent.futures import Future, InvalidStateError
from contextvars import ContextVar
from typing import TYPE_CHECKING, TypeVar

from qwen3_asgi.errors import ClientDisconnected

if TYPE_CHECKING:
    from collections.abc import Callable

    from qwen3_asgi.engine.mailbox import Mailbox

logger = logging.getLogger(__name__)

T = TypeVar("T")


class RequestBinding:
    """The generations of one watched request. All methods may be called from any thread."""

    __slots__ = ("_live", "_on_first", "_released", "_waiting", "disconnected")

    def __init__(self, on_first: Callable[[], None] | None = None) -> None:
        self._live: dict[str, Mailbox] = {}
        self._waiting: set[Future[None]] = set()
        self._on_first = on_first
        self._released = False
        self.disconnected = False

    def check(self) -> None:
        """
        Raises:
            ClientDisconnected: the client has gone already.
        """
        if self.disconnected and not self._released:
            raise ClientDisconnected("the client has gone")

    def bind(self, mailbox: Mailbox) -> None:
        """Cancel this generation when the client goes."""
        if self._released:
            return
        self._live[mailbox.request_id] = mailbox
        self._begin()
        if self.disconnected:  # it went while we were binding
            mailbox.fail(ClientDisconnected("the client has gone"))

    def unbind(self, mailbox: Mailbox) -> None:
        self._live.pop(mailbox.request_id, None)

    def unless_gone(self, future: Future[T]) -> Future[T]:
        """`future`, but with `ClientDisconnected` in its place as soon as the client goes."""
        if self._released or future.done():
            return future
        answer: Future[T] = Future()
        gone: Future[None] = Future()

        def settle(_: Future[T] | Future[None]) -> None:
            self._waiting.discard(gone)
            with contextlib.suppress(InvalidStateError):  # the other one was faster
                if not future.done():
                    answer.set_exception(ClientDisconnected("the client has gone"))
                elif (error := future.exception()) is not None:
                    answer.set_exception(error)
                else:
                    answer.set_result(future.result())

        self._waiting.add(gone)
        gone.add_done_callback(settle)
        future.add_done_callback(settle)
        self._begin()
        if self.disconnected:
            _complete(gone)
        return answer

    def disconnect(self, phase: str) -> None:
        """The client has gone: cancel everything now.

        `phase` is "before_response" or "streaming", for the counter.
        """
        if self._released or self.disconnected:
            return
        self.disconnected = True
        for gone in self._waiting.copy():
            _complete(gone)
        # `copy` is one step: a finalizer may unbind in the middle of a plain iteration.
        live = list(self._live.copy().values())
        for mailbox in live:
            mailbox.fail(ClientDisconnected("the client has gone"))
        for notify in {mailbox.on_disconnect: None for mailbox in live}:
            notify(phase)
        if live:
            logger.info("client closed the request (499), %d generations cancelled", len(live))

    def release(self) -> None:
        """The response is complete: what runs on (a background task) is nobody's request now."""
        self._released = True
        self._on_first = None
        self._live.clear()
        self._waiting.clear()

    def _begin(self) -> None:
        on_first, self._on_first = self._on_first, None
        if on_first is not None:
            on_first()


def _complete(future: Future[None]) -> None:
    with contextlib.suppress(InvalidStateError):  # another thread was faster
        future.set_result(None)


current_binding: ContextVar[RequestBinding | None] = ContextVar(
    "qwen3_asgi_request_binding", default=None
)
