"""A `SchedulerObserver` that can fail without harm: what it raises is logged, never propagated."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, ParamSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from qwen3_asgi.scheduler.events import Finish, SchedulerObserver
    from qwen3_asgi.scheduler.load import LoadSnapshot
    from qwen3_asgi.scheduler.plan import StepPlan
    from qwen3_asgi.scheduler.request import Request, State

P = ParamSpec("P")
logger = logging.getLogger(__name__)


class GuardedObserver:
    """Passes every call on to `observer`, if there is one."""

    def __init__(self, observer: SchedulerObserver | None) -> None:
        self._observer = observer

    def on_load(self, load: LoadSnapshot) -> None:
        if self._observer is not None:
            _guard(self._observer.on_load, load)

    def on_step(self, plan: StepPlan, seconds: float) -> None:
        if self._observer is not None:
            _guard(self._observer.on_step, plan, seconds)

    def on_step_failure(self, plan: StepPlan, error: Exception) -> None:
        if self._observer is not None:
            _guard(self._observer.on_step_failure, plan, error)

    def on_sweep(self, seconds: float, num_swept: int) -> None:
        if self._observer is not None:
            _guard(self._observer.on_sweep, seconds, num_swept)

    def on_admit(self, request: Request, cached_tokens: int) -> None:
        if self._observer is not None:
            _guard(self._observer.on_admit, request, cached_tokens)

    def on_preempt(self, request: Request) -> None:
        if self._observer is not None:
            _guard(self._observer.on_preempt, request)

    def on_tokens(
        self, first: Sequence[tuple[Request, float]], intervals: Mapping[float, int]
    ) -> None:
        if self._observer is not None:
            _guard(self._observer.on_tokens, first, intervals)

    def on_cancel(self, request: Request, state: State, wasted_tokens: int) -> None:
        # Not through `_guard`, and the same below: a sweep may drop thousands.
        if self._observer is not None:
            try:
                self._observer.on_cancel(request, state, wasted_tokens)
            except Exception:
                logger.exception("the observer failed")

    def on_finish(self, request: Request, finish: Finish) -> None:
        if self._observer is not None:
            try:
                self._observer.on_finish(request, finish)
            except Exception:
                logger.exception("the observer failed")


def _guard(call: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
    try:
        call(*args, **kwargs)
    except Exception:
        logger.exception("the observer failed")
