"""OpenTelemetry spans: one for each request, as a child of its caller's, with its phases inside.

They are made when the request has ended, on a thread of their own, from the times that the
scheduler has noted anyway: a token costs nothing more.
"""

from __future__ import annotations

import logging
import threading
import time
from importlib.util import find_spec
from queue import SimpleQueue
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from opentelemetry.context import Context
    from opentelemetry.trace import Tracer

    from qwen3_asgi.scheduler.events import Finish
    from qwen3_asgi.scheduler.load import LoadSnapshot
    from qwen3_asgi.scheduler.plan import RequestId, StepPlan
    from qwen3_asgi.scheduler.request import Request, State

logger = logging.getLogger(__name__)
MISSING = "tracing needs opentelemetry-api: pip install 'qwen3-asgi[otel]'"
EXIT_SECONDS = 5.0


def check_installed() -> None:
    """
    Raises:
        ImportError: opentelemetry-api is not installed; the message says how to get it.
    """
    if find_spec("opentelemetry") is None or find_spec("opentelemetry.trace") is None:
        raise ImportError(MISSING)


class Opened(NamedTuple):
    """What is known at the submit: the caller's context, and wall time less monotonic time."""

    context: Context
    offset: float


class Life(NamedTuple):
    """One ended request, read on the scheduler thread."""

    opened: Opened
    request: Request
    finish: Finish
    ended_at: float
    swept_from: str | None


class RequestSpans:
    """Makes the spans of one engine's requests; a `SchedulerObserver`.

    `open` is called on the caller's thread, the observer's methods on the scheduler's.

    Args:
        model_name: the attribute `gen_ai.request.model`.
        tracer: None takes the global provider's.
    """

    def __init__(self, model_name: str, tracer: Tracer | None = None) -> None:
        check_installed()
        from opentelemetry import trace

        self._tracer = tracer or trace.get_tracer("qwen3_asgi")
        self._model_name = model_name
        self._opened: dict[RequestId, Opened] = {}
        self._swept: dict[RequestId, str] = {}
        self._ended: SimpleQueue[Life | None] = SimpleQueue()
        self._thread = threading.Thread(
            target=self._run, name=f"qwen3-asgi {model_name} spans", daemon=True
        )
        self._thread.start()

    def open(self, requests: Iterable[Request]) -> None:
        """They are about to be submitted, in the caller's context."""
        from opentelemetry.context import get_current

        opened = Opened(get_current(), time.time() - time.monotonic())
        for request in requests:
            self._opened[request.id] = opened

    def forget(self, requests: Iterable[Request]) -> None:
        """They were not submitted after all."""
        for request in requests:
            self._opened.pop(request.id, None)

    def close(self) -> None:
        """Make the spans of all that have ended, and end the thread."""
        self._ended.put(None)
        self._thread.join(EXIT_SECONDS)

    # ---- SchedulerObserver ----

    def on_cancel(self, request: Request, state: State, wasted_tokens: int) -> None:
        self._swept[request.id] = state.value

    def on_finish(self, request: Request, finish: Finish) -> None:
        swept_from = self._swept.pop(request.id, None)
        opened = self._opened.pop(request.id, None)
        if opened is not None:
            ended_at = request.last_token_at
            if ended_at is None or finish.reason in ("abort", "error"):
                ended_at = time.monotonic()
            self._ended.put(Life(opened, request, finish, ended_at, swept_from))

    def on_load(self, load: LoadSnapshot) -> None: ...

    def on_step(self, plan: StepPlan, seconds: float) -> None: ...

    def on_step_failure(self, plan: StepPlan, error: Exception) -> None: ...

    def on_sweep(self, seconds: float, num_swept: int) -> None: ...

    def on_admit(self, request: Request, cached_tokens: int) -> None: ...

    def on_preempt(self, request: Request) -> None: ...

    def on_tokens(
        self, first: Sequence[tuple[Request, float]], intervals: Mapping[float, int]
    ) -> None: ...

    # ---- the spans' thread ----

    def _run(self) -> None:
        while (life := self._ended.get()) is not None:
            try:
                self._make(life)
            except Exception:
                logger.exception("making the spans of request %s failed", life.request.id)

    def _make(self, life: Life) -> None:
        from opentelemetry.trace import Status, StatusCode, set_span_in_context

        request, finish = life.request, life.finish

        def nanoseconds(at: float) -> int:
            return int((at + life.opened.offset) * 1e9)

        end = nanoseconds(life.ended_at)
        whole = self._tracer.start_span(
            f"generate {self._model_name}",
            context=life.opened.context,
            start_time=nanoseconds(request.arrival),
            attributes=_attributes(life, self._model_name),
        )
        if finish.error is not None:
            whole.set_attribute("error.type", type(finish.error).__name__)
            whole.set_status(Status(StatusCode.ERROR, str(finish.error)))
        elif finish.reason == "abort":
            whole.set_attribute("error.type", "cancelled")
            whole.set_status(Status(StatusCode.ERROR, "cancelled"))
        inside = set_span_in_context(whole, life.opened.context)
        for name, begin, until in phases(request, life.ended_at):
            part = self._tracer.start_span(name, context=inside, start_time=nanoseconds(begin))
            part.end(nanoseconds(until))
        whole.end(end)


def phases(request: Request, ended_at: float) -> Iterator[tuple[str, float, float]]:
    """The phases that a request has come to, each with its begin and end."""
    admitted, first = request.admitted_at, request.first_token_at
    yield "queue", request.arrival, ended_at if admitted is None else admitted
    if request.load_began_at is not None:
        loaded = request.load_ended_at
        yield "load", request.load_began_at, ended_at if loaded is None else loaded
    if admitted is not None:
        yield "prefill", admitted, ended_at if first is None else first
    if first is not None:
        yield "decode", first, ended_at


def _attributes(life: Life, model_name: str) -> dict[str, str | int | tuple[str, ...]]:
    request, finish = life.request, life.finish
    attributes: dict[str, str | int | tuple[str, ...]] = {
        "gen_ai.request.model": model_name,
        "gen_ai.usage.input_tokens": finish.prompt_tokens,
        "gen_ai.usage.output_tokens": finish.completion_tokens,
        "gen_ai.response.finish_reasons": (finish.reason,),
        "qwen3_asgi.request_id": request.id,
        "qwen3_asgi.cached_tokens": finish.cached_tokens,
        "qwen3_asgi.num_preemptions": request.num_preemptions,
    }
    if request.adapter is not None:
        attributes["qwen3_asgi.adapter"] = request.adapter
    if life.swept_from is not None:
        attributes["qwen3_asgi.swept_from"] = life.swept_from
    return attributes
