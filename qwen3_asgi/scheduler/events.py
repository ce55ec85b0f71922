"""What the scheduler tells the outside: token events, the one terminal event, and measurements."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from qwen3_asgi.scheduler.load import LoadSnapshot
    from qwen3_asgi.scheduler.plan import RequestId, SampledToken, StepPlan
    from qwen3_asgi.scheduler.request import Request, State

FinishReason = Literal["stop", "length", "abort", "error"]


class Finish(NamedTuple):
    """The terminal event's content. `error` is set when `reason` is "error" (or a refusal).

    `stop_reason` is the stop token id or stop string that matched; None for eos, length, abort.
    `stop_token` is the last token when that token itself ended the output (eos or a stop id): it is
    counted as generated, but its text is not part of the output.
    """

    reason: FinishReason
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    stop_reason: int | str | None = None
    stop_token: int | None = None
    error: Exception | None = None


class Event(NamedTuple):
    """One request's news of one step: a token, its end, or both."""

    request_id: RequestId
    token: SampledToken | None
    finish: Finish | None


class EventSink(Protocol):
    """Takes the events of a step. Called on the scheduler thread; must never block."""

    def deliver(self, events: Sequence[Event]) -> None: ...


class SchedulerObserver(Protocol):
    """Takes measurements. Called on the scheduler thread; must never block.

    Times are seconds on the scheduler's monotonic clock. What it raises is logged, not propagated.
    """

    def on_load(self, load: LoadSnapshot) -> None:
        """A snapshot was published (also the last one, 0/0, when the loop ends)."""
        ...

    def on_step(self, plan: StepPlan, seconds: float) -> None:
        """A step was executed (also when it failed)."""
        ...

    def on_step_failure(self, plan: StepPlan, error: Exception) -> None:
        """A step failed as a whole, and all its requests end (after its `on_step`)."""
        ...

    def on_sweep(self, seconds: float, num_swept: int) -> None:
        """A sweep that had something to drop took this long."""
        ...

    def on_admit(self, request: Request, cached_tokens: int) -> None:
        """A request entered `prefilling`, with this many of its tokens in the prefix cache."""
        ...

    def on_preempt(self, request: Request) -> None:
        """A running request gave its blocks back and returned to `deferred`."""
        ...

    def on_tokens(
        self, first: Sequence[tuple[Request, float]], intervals: Mapping[float, int]
    ) -> None:
        """A step's tokens: first ones, each with the seconds since its request's arrival, and for
        all others how many came how many seconds after the token before."""
        ...

    def on_cancel(self, request: Request, state: State, wasted_tokens: int) -> None:
        """The sweep dropped a request from the queue `state`.

        `wasted_tokens` were computed for it after its `cancel()`.
        """
        ...

    def on_finish(self, request: Request, finish: Finish) -> None:
        """A request's terminal event (also after `on_cancel`)."""
        ...
