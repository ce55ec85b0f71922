"""Measurements in, metrics out: the observer that a scheduler, its delivery and the HTTP side call.

It counts from the start, into the engine's own instruments; registries only show them.
"""

from __future__ import annotations

import functools
import logging
import threading
from typing import TYPE_CHECKING, Concatenate, ParamSpec, get_args

from qwen3_asgi.errors import GenerationTimeout
from qwen3_asgi.metrics import catalogue, families
from qwen3_asgi.metrics.instruments import Instruments, multiprocess_mode, observe_many
from qwen3_asgi.scheduler.events import FinishReason
from qwen3_asgi.scheduler.load import LoadSnapshot
from qwen3_asgi.scheduler.queues import SWEPT_STATES
from qwen3_asgi.scheduler.request import State

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from prometheus_client import CollectorRegistry

    from qwen3_asgi.scheduler.events import Finish
    from qwen3_asgi.scheduler.plan import StepPlan
    from qwen3_asgi.scheduler.request import Request

logger = logging.getLogger(__name__)

Arguments = ParamSpec("Arguments")
_STEP_KINDS = ("prefill", "decode", "mixed")
_WAITING_REASONS = ("capacity", "loading", "control")


def _never_raises(
    method: Callable[Concatenate[EngineMetrics, Arguments], None],
) -> Callable[Concatenate[EngineMetrics, Arguments], None]:
    """A measurement that fails (a full disk in multiprocess mode) must not cost a token.

    The first failure is logged, the rest are not: there may be one per token.
    """

    def guarded(self: EngineMetrics, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> None:
        try:
            method(self, *args, **kwargs)
        except Exception:
            self.report_failure()

    return functools.update_wrapper(guarded, method)


class _Swept:
    """What a sweep has dropped so far; `request` is the last of them."""

    __slots__ = ("aborted", "avoided_tokens", "request", "states", "wasted_tokens")

    def __init__(self) -> None:
        self.request: Request | None = None
        self.states: dict[State, int] = {}
        self.wasted_tokens = 0
        self.avoided_tokens = 0
        self.aborted = 0


class EngineMetrics:
    """The metrics of one engine; a `SchedulerObserver`.

    The `on_…` methods of the observer are called on the scheduler thread; `attach`, `detach`,
    `close`, `on_client_disconnect`, `on_timeout`, `on_stall` and `on_wakeups` may be called on any.

    Args:
        model_name: the label `model_name`.
        engine_label: the label `engine`, unique among the process's engines of that model name:
            a registry refuses two engines with the same labels, because a gauge that two engines
            set in turn tells the truth about neither.
    """

    def __init__(self, model_name: str, engine_label: str) -> None:
        self._use(Instruments(model_name, engine_label))

    def _use(self, instruments: Instruments) -> None:
        self._instruments = instruments
        self._failed = False
        # Between `on_load` on the scheduler thread and `close` on another.
        self._load_lock = threading.Lock()
        self._swept = _Swept()
        self._load = LoadSnapshot()
        self._set_running = instruments.gauge(catalogue.NUM_REQUESTS_RUNNING).set
        self._set_waiting = instruments.gauge(catalogue.NUM_REQUESTS_WAITING).set
        self._set_kv_usage = instruments.gauge(catalogue.KV_CACHE_USAGE).set
        self._set_adapters = instruments.gauge(catalogue.LORA_ADAPTERS).set
        self._set_reasons = tuple(
            instruments.gauge(catalogue.NUM_REQUESTS_WAITING_BY_REASON, reason).set
            for reason in _WAITING_REASONS
        )

        counter, histogram = instruments.counter, instruments.histogram
        self._prompt_tokens = counter(catalogue.PROMPT_TOKENS).inc
        self._generation_tokens = counter(catalogue.GENERATION_TOKENS).inc
        self._prefix_queries = counter(catalogue.PREFIX_CACHE_QUERIES).inc
        self._prefix_hits = counter(catalogue.PREFIX_CACHE_HITS).inc
        self._external_queries = counter(catalogue.EXTERNAL_PREFIX_CACHE_QUERIES).inc
        self._external_hits = counter(catalogue.EXTERNAL_PREFIX_CACHE_HITS).inc
        self._timeouts = counter(catalogue.REQUEST_TIMEOUTS).inc
        self._step_failures = counter(catalogue.STEP_FAILURES).inc
        self._stalled_steps = counter(catalogue.STALLED_STEPS).inc
        self._preemptions = counter(catalogue.NUM_PREEMPTIONS).inc
        self._wasted_tokens = counter(catalogue.WASTED_TOKENS).inc
        self._prefill_avoided = counter(catalogue.PREFILL_TOKENS_AVOIDED).inc
        self._wakeups = counter(catalogue.EVENT_LOOP_WAKEUPS).inc
        self._first_token = histogram(catalogue.TIME_TO_FIRST_TOKEN).observe
        self._inter_token = observe_many(histogram(catalogue.INTER_TOKEN_LATENCY))
        self._e2e = histogram(catalogue.E2E_REQUEST_LATENCY).observe
        self._queue_time = histogram(catalogue.REQUEST_QUEUE_TIME).observe
        self._prefill_time = histogram(catalogue.REQUEST_PREFILL_TIME).observe
        self._decode_time = histogram(catalogue.REQUEST_DECODE_TIME).observe
        self._sweep = histogram(catalogue.SWEEP_SECONDS).observe
        # Every label value known beforehand has its series from the start: `rate()` sees no change
        # in a series that appears with its first count.
        self._finished = {
            reason: counter(catalogue.REQUEST_SUCCESS, reason).inc
            for reason in get_args(FinishReason)
        }
        # In the order of the states; none is swept from `inflight`.
        self._cancelled = {
            state: counter(catalogue.REQUESTS_CANCELLED, state.value).inc
            for state in State
            if state in SWEPT_STATES
        }
        self._step = {kind: histogram(catalogue.STEP_SECONDS, kind).observe for kind in _STEP_KINDS}

    def attach(self, registry: CollectorRegistry) -> None:
        """Show this engine's metrics in a registry, with all that was measured so far.

        Attaching again changes nothing. Works before, while and after the engine runs.

        Raises:
            MetricNameTaken: a metric that is not ours has one of our names.
            MetricLabelsTaken: another engine in this registry has the same labels.
        """
        families.attach(registry, self._instruments)

    def detach(self, registry: CollectorRegistry) -> None:
        """Take this engine's series out of a registry. Its measurements are kept."""
        families.detach(registry, self._instruments)

    def after_fork(self) -> None:
        """In the child of a fork: count from zero, in every registry that shows this engine.

        With new instruments, since another thread may have held the lock of an old one. Not in
        prometheus_client's multiprocess mode, which starts a child's files from zero by itself.
        """
        old = self._instruments
        if multiprocess_mode():
            self._use(old)
        else:
            self._use(Instruments(*old.engine_labels))
            families.replace(old, self._instruments)

    def close(self) -> None:
        """The engine has stopped: the gauges fall to zero, all series stay. May be repeated."""
        self.on_load(LoadSnapshot())

    # ---- SchedulerObserver ----

    @_never_raises
    def on_load(self, load: LoadSnapshot) -> None:
        self._tell_swept()
        with self._load_lock:
            before = self._load
            if load.num_running != before.num_running:
                self._set_running(load.num_running)
            if load.num_waiting != before.num_waiting:
                self._set_waiting(load.num_waiting)
            if (reasons := waiting_by_reason(load)) != waiting_by_reason(before):
                for set_reason, count in zip(self._set_reasons, reasons, strict=True):
                    set_reason(count)
            if load.num_adapters != before.num_adapters:
                self._set_adapters(load.num_adapters)
            if (usage := load.kv_usage) != before.kv_usage:
                self._set_kv_usage(usage)
            self._load = load

    @_never_raises
    def on_step(self, plan: StepPlan, seconds: float) -> None:
        if plan.rows:
            self._step[plan.kind](seconds)

    @_never_raises
    def on_step_failure(self, plan: StepPlan, error: Exception) -> None:
        self._step_failures()

    @_never_raises
    def on_sweep(self, seconds: float, num_swept: int) -> None:
        self._sweep(seconds)
        self._tell_swept()

    @_never_raises
    def on_admit(self, request: Request, cached_tokens: int) -> None:
        # A preempted request finds its own blocks: that says nothing about what prompts share.
        # Forks don't look: their prompt is counted once, with their parent's.
        if request.num_preemptions == 0 and request.fork_of is None:
            self._prefix_queries(request.prompt_len)
            # What came from a lower tier was found there, and not on the device.
            on_device = max(0, cached_tokens - request.loaded_tokens)
            self._prefix_hits(on_device)
            self._external_queries(request.prompt_len - on_device)
            self._external_hits(cached_tokens - on_device)

    @_never_raises
    def on_preempt(self, request: Request) -> None:
        self._preemptions()

    @_never_raises
    def on_tokens(
        self, first: Sequence[tuple[Request, float]], intervals: Mapping[float, int]
    ) -> None:
        for request, seconds in first:
            if request.fork_of is None:
                self._prompt_tokens(request.prompt_len)
            self._first_token(seconds)
        for seconds, count in intervals.items():
            self._inter_token(seconds, count)
        self._generation_tokens(len(first) + sum(intervals.values()))

    @_never_raises
    def on_cancel(self, request: Request, state: State, wasted_tokens: int) -> None:
        # Counted up and told once for all: a sweep may drop thousands, and each `inc` is a lock.
        swept = self._swept
        swept.request = request
        swept.states[state] = swept.states.get(state, 0) + 1
        swept.wasted_tokens += wasted_tokens
        # After the first token the whole prompt was computed, also when preemption has moved the
        # cursor back since.
        if request.first_token_at is None and request.prompt_len > request.num_computed:
            swept.avoided_tokens += request.prompt_len - request.num_computed

    @_never_raises
    def on_finish(self, request: Request, finish: Finish) -> None:
        if request is self._swept.request and finish.reason == "abort":
            self._swept.aborted += 1
            return
        self._finished[finish.reason]()
        if isinstance(finish.error, GenerationTimeout):
            self._timeouts()
        if finish.reason not in ("stop", "length"):
            return
        admitted, first, last = request.admitted_at, request.first_token_at, request.last_token_at
        if admitted is None or first is None or last is None:
            return
        # All four at the end and of the same requests, as vLLM does: so the parts add up to the
        # whole. The last token ends the request, so its time is the time of the end.
        self._e2e(last - request.arrival)
        self._queue_time(admitted - request.arrival)
        self._prefill_time(first - admitted)
        self._decode_time(last - first)

    def _tell_swept(self) -> None:
        """Count what `on_cancel` and the `on_finish` after it have added up."""
        if self._swept.request is None:
            return
        swept, self._swept = self._swept, _Swept()
        for state, count in swept.states.items():
            self._cancelled[state](count)
        self._wasted_tokens(swept.wasted_tokens)
        self._prefill_avoided(swept.avoided_tokens)
        self._finished["abort"](swept.aborted)

    # ---- from any thread ----

    @_never_raises
    def on_client_disconnect(self, phase: str) -> None:
        """A client left before its response was complete. `phase` is one of a few fixed words."""
        self._instruments.counter(catalogue.CLIENT_DISCONNECTS, phase).inc()

    @_never_raises
    def on_timeout(self) -> None:
        """A request's time was up before the scheduler had it."""
        self._timeouts()

    @_never_raises
    def on_stall(self) -> None:
        """A step takes longer than `EngineConfig.step_warn_seconds`."""
        self._stalled_steps()

    @_never_raises
    def on_wakeups(self, count: int) -> None:
        """Event loops were woken `count` times."""
        self._wakeups(count)

    def report_failure(self) -> None:
        """Log the exception being handled, once."""
        if not self._failed:
            self._failed = True
            logger.exception("a measurement failed; further failures are not logged")


def waiting_by_reason(load: LoadSnapshot) -> tuple[int, int, int]:
    """The waiting requests, split as `_WAITING_REASONS`."""
    capacity = load.num_waiting - load.num_loading - load.num_held
    return capacity, load.num_loading, load.num_held
