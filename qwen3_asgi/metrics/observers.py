"""Several observers in the place of one: each is told everything, whatever the others raise."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from qwen3_asgi.scheduler.events import Finish, SchedulerObserver
    from qwen3_asgi.scheduler.load import LoadSnapshot
    from qwen3_asgi.scheduler.plan import StepPlan
    from qwen3_asgi.scheduler.request import Request, State

logger = logging.getLogger(__name__)


class Observers:
    """A `SchedulerObserver` that passes every call on."""

    def __init__(self, *observers: SchedulerObserver) -> None:
        self._observers = observers

    @classmethod
    def of(cls, first: SchedulerObserver, *others: SchedulerObserver | None) -> SchedulerObserver:
        """Those that there are; the first itself if it is the only one."""
        present = [other for other in others if other is not None]
        return cls(first, *present) if present else first

    def on_load(self, load: LoadSnapshot) -> None:
        self._tell(lambda each: each.on_load(load))

    def on_step(self, plan: StepPlan, seconds: float) -> None:
        self._tell(lambda each: each.on_step(plan, seconds))

    def on_step_failure(self, plan: StepPlan, error: Exception) -> None:
        self._tell(lambda each: each.on_step_failure(plan, error))

    def on_sweep(self, seconds: float, num_swept: int) -> None:
        self._tell(lambda each: each.on_sweep(seconds, num_swept))

    def on_admit(self, request: Request, cached_tokens: int) -> None:
        self._tell(lambda each: each.on_admit(request, cached_tokens))

    def on_preempt(self, request: Request) -> None:
        self._tell(lambda each: each.on_preempt(request))

    def on_tokens(
        self, first: Sequence[tuple[Request, float]], intervals: Mapping[float, int]
    ) -> None:
        self._tell(lambda each: each.on_tokens(first, intervals))

    def on_cancel(self, request: Request, state: State, wasted_tokens: int) -> None:
        self._tell(lambda each: each.on_cancel(request, state, wasted_tokens))

    def on_finish(self, request: Request, finish: Finish) -> None:
        self._tell(lambda each: each.on_finish(request, finish))

    def _tell(self, tell: Callable[[SchedulerObserver], None]) -> None:
        for observer in self._observers:
            try:
                tell(observer)
            except Exception:
                logger.exception("an observer failed")
