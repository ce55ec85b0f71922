"""Who comes in: checked, given an adapter that is there, and put where it has to wait."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qwen3_asgi.errors import InvalidRequest
from qwen3_asgi.scheduler.effects import finish
from qwen3_asgi.scheduler.inbox import Cancelled
from qwen3_asgi.scheduler.prefix import root_digest
from qwen3_asgi.scheduler.request import Limits, Request, State, check_fits

if TYPE_CHECKING:
    from collections.abc import Callable

    from qwen3_asgi.scheduler.control import Controls
    from qwen3_asgi.scheduler.deadlines import Deadlines
    from qwen3_asgi.scheduler.endings import Endings
    from qwen3_asgi.scheduler.loading import Loading
    from qwen3_asgi.scheduler.queues import QueueTable


class Arrivals:
    """Owned by the scheduler thread."""

    def __init__(
        self,
        queues: QueueTable,
        limits: Limits,
        controls: Controls,
        deadlines: Deadlines,
        loading: Loading | None,
        endings: Endings,
        cancel: Callable[[Cancelled], None],
    ) -> None:
        self._queues = queues
        self._limits = limits
        self._controls = controls
        self._deadlines = deadlines
        self._loading = loading
        self._endings = endings
        self._cancel = cancel

    def accept(self, request: Request) -> None:
        """A new request: to its queue, or refused at once if it can never be served."""
        try:
            request.max_tokens = check_fits(request.prompt_len, request.max_tokens, self._limits)
            if self._queues.get(request.id) is not None:
                raise InvalidRequest(f"request id {request.id!r} is in use", param="request_id")
        except InvalidRequest as error:
            self._endings.refuse(request, error)
            return
        request.end_len = request.prompt_len + request.max_tokens
        if (parent := request.fork_of) is not None:
            if parent.state is not None:
                parent.forks += (request,)
            elif parent.swept is not None:  # it was cancelled when this one was on its way
                self._cancel(Cancelled(request.id, 0, parent.swept.error))
        self._deadlines.add(request)
        self._controls.arrive(request)
        if self._controls.must_wait(request):
            self._queues.put(request, State.POST_CONTROL_DEFERRED)
        else:
            self._defer(request)

    def control(self) -> None:
        """Carry out the control commands that are due; who waited for them goes on."""
        # Who is released may be refused at once, and be all that the next command waited for.
        while released := self._controls.apply_due():
            for request in released:
                self._defer(request)

    def _defer(self, request: Request) -> None:
        """To `deferred`, with an adapter that is there."""
        adapter = request.adapter
        fingerprint = "" if adapter is None else self._controls.adapters.get(adapter)
        if fingerprint is None:
            error = InvalidRequest(
                f"there is no adapter {adapter!r}", param="model", code="model_not_found"
            )
            if request.state is None:
                self._endings.refuse(request, error)
            else:
                self._endings.end(request, finish(request, "error", error=error))
            return
        request.cache_root = root_digest(request.cache_salt, fingerprint)
        self._queues.put(request, State.DEFERRED)
        if self._loading is not None:
            self._loading.arrived(request)
