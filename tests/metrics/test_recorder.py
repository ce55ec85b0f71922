"""What each measurement adds to which series."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, ClassVar, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram

from qwen3_asgi.errors import GenerationTimeout
from qwen3_asgi.metrics import EngineMetrics
from qwen3_asgi.metrics.catalogue import INTER_TOKEN_BUCKETS
from qwen3_asgi.metrics.instruments import observe_many
from qwen3_asgi.scheduler.events import Finish, FinishReason, SchedulerObserver
from qwen3_asgi.scheduler.load import LoadSnapshot
from qwen3_asgi.scheduler.plan import RequestId, Row, RowKind, StepPlan
from qwen3_asgi.scheduler.queues import SWEPT_STATES
from qwen3_asgi.scheduler.request import Request, State

if TYPE_CHECKING:
    from tests.metrics.conftest import Sample

CANCELLED = "qwen3_asgi_requests_cancelled_total"
AVOIDED = "qwen3_asgi_prefill_tokens_avoided_total"
PARTS = ("request_queue_time", "request_prefill_time", "request_decode_time")


def finish(reason: FinishReason) -> Finish:
    return Finish(reason=reason, prompt_tokens=10, cached_tokens=4, completion_tokens=3)


def plan(*kinds: RowKind) -> StepPlan:
    rows = tuple(Row(RequestId(str(i)), kind, [1], 0, [0], None) for i, kind in enumerate(kinds))
    return StepPlan(1, rows)


def test_it_is_a_scheduler_observer(metrics: EngineMetrics) -> None:
    observer: SchedulerObserver = metrics
    observer.on_load(LoadSnapshot())
    wanted = {name for name in vars(SchedulerObserver) if name.startswith("on_")}
    assert wanted
    assert wanted <= set(dir(EngineMetrics))


def test_a_request_that_runs_to_its_end_is_counted_in_full(
    registry: CollectorRegistry, metrics: EngineMetrics, request_of_ten: Request, sample: Sample
) -> None:
    metrics.attach(registry)
    metrics.on_admit(request_of_ten, cached_tokens=4)
    metrics.on_step(plan("prefill"), 0.02)
    metrics.on_tokens([(request_of_ten, 1.0)], {})
    metrics.on_step(plan("decode"), 0.01)
    metrics.on_tokens([], {0.1: 1})
    metrics.on_step(plan("decode", "prefill"), 0.03)
    metrics.on_tokens([], {0.1: 1})
    metrics.on_finish(request_of_ten, finish("stop"))

    assert sample(registry, "vllm:prefix_cache_queries_total") == 10
    assert sample(registry, "vllm:prefix_cache_hits_total") == 4
    assert sample(registry, "vllm:prompt_tokens_total") == 10
    assert sample(registry, "vllm:generation_tokens_total") == 3
    assert sample(registry, "vllm:request_success_total", finished_reason="stop") == 1
    assert sample(registry, "vllm:time_to_first_token_seconds_sum") == 1.0
    assert sample(registry, "vllm:inter_token_latency_seconds_count") == 2
    assert sample(registry, "vllm:e2e_request_latency_seconds_sum") == pytest.approx(1.2)
    assert [sample(registry, f"vllm:{part}_seconds_sum") for part in PARTS] == pytest.approx(
        [0.5, 0.5, 0.2]
    )
    for kind, seconds in (("prefill", 0.02), ("decode", 0.01), ("mixed", 0.03)):
        assert sample(registry, "qwen3_asgi_step_seconds_sum", kind=kind) == seconds


@pytest.mark.parametrize("reason", get_args(FinishReason))
def test_every_finish_reason_is_counted_and_only_whole_requests_are_timed(
    reason: FinishReason,
    registry: CollectorRegistry,
    metrics: EngineMetrics,
    request_of_ten: Request,
    sample: Sample,
) -> None:
    metrics.attach(registry)
    metrics.on_finish(request_of_ten, finish(reason))
    for other in get_args(FinishReason):
        expected = int(other == reason)
        assert sample(registry, "vllm:request_success_total", finished_reason=other) == expected
    whole = int(reason in ("stop", "length"))
    for part in ("e2e_request_latency", *PARTS):
        assert sample(registry, f"vllm:{part}_seconds_count") == whole


def test_a_finish_before_admission_is_counted_and_not_timed(
    registry: CollectorRegistry, metrics: EngineMetrics, sample: Sample
) -> None:
    metrics.attach(registry)
    metrics.on_finish(Request("refused", [1]), finish("length"))
    assert sample(registry, "vllm:request_success_total", finished_reason="length") == 1
    assert sample(registry, "vllm:e2e_request_latency_seconds_count") == 0


@pytest.mark.parametrize(
    ("state", "computed", "first_token_at", "avoided"),
    [
        (State.DEFERRED, 0, None, 10),
        (State.LOADING, 0, None, 10),
        (State.PREFILLING, 6, None, 4),
        (State.ACTIVE, 12, 101.0, 0),
        (State.DEFERRED, 0, 101.0, 0),
        (State.PREFILLING, 12, None, 0),
    ],
    ids=["queued", "loading", "half prefilled", "decoding", "preempted", "nothing left"],
)
def test_a_cancelled_request_counts_its_queue_and_the_prompt_that_was_not_computed(
    state: State,
    computed: int,
    first_token_at: float | None,
    avoided: int,
    registry: CollectorRegistry,
    metrics: EngineMetrics,
    sample: Sample,
) -> None:
    request = Request("r", range(10))
    request.num_computed, request.first_token_at = computed, first_token_at
    metrics.attach(registry)
    metrics.on_cancel(request, state, wasted_tokens=2)
    metrics.on_sweep(0.0001, 1)
    for other in SWEPT_STATES:
        assert sample(registry, CANCELLED, state=other.value) == int(other is state)
    assert len(SWEPT_STATES) == 5
    labels = {"model_name": "tiny", "engine": "0", "state": State.INFLIGHT.value}
    assert registry.get_sample_value(CANCELLED, labels) is None, "nothing is swept from there"
    assert sample(registry, AVOIDED) == avoided
    assert sample(registry, "qwen3_asgi_wasted_tokens_total") == 2
    assert sample(registry, "qwen3_asgi_sweep_seconds_sum") == 0.0001


def test_what_a_sweep_ends_is_counted_once_however_many_it_drops(
    registry: CollectorRegistry, metrics: EngineMetrics, sample: Sample
) -> None:
    metrics.attach(registry)
    for i in range(3):
        request = Request(f"r{i}", range(10))
        metrics.on_cancel(request, State.DEFERRED, wasted_tokens=1)
        metrics.on_finish(request, finish("abort"))
    metrics.on_finish(Request("other", range(10)), finish("abort"))
    metrics.on_load(LoadSnapshot())  # before anybody can see their ends
    assert sample(registry, CANCELLED, state="deferred") == 3
    assert sample(registry, AVOIDED) == 30
    assert sample(registry, "qwen3_asgi_wasted_tokens_total") == 3
    assert sample(registry, "vllm:request_success_total", finished_reason="abort") == 4
    metrics.on_sweep(0.1, 3)
    metrics.on_load(LoadSnapshot())
    assert sample(registry, CANCELLED, state="deferred") == 3


def test_a_preempted_request_is_looked_up_in_the_prefix_cache_once(
    registry: CollectorRegistry, metrics: EngineMetrics, request_of_ten: Request, sample: Sample
) -> None:
    metrics.attach(registry)
    metrics.on_admit(request_of_ten, cached_tokens=0)
    request_of_ten.num_preemptions = 1
    metrics.on_preempt(request_of_ten)
    metrics.on_admit(request_of_ten, cached_tokens=10)
    assert sample(registry, "vllm:num_preemptions_total") == 1
    assert sample(registry, "vllm:prefix_cache_queries_total") == 10
    assert sample(registry, "vllm:prefix_cache_hits_total") == 0


def test_what_a_lower_tier_had_is_no_hit_of_the_device(
    registry: CollectorRegistry, metrics: EngineMetrics, request_of_ten: Request, sample: Sample
) -> None:
    metrics.attach(registry)
    request_of_ten.loaded_tokens = 6
    metrics.on_admit(request_of_ten, cached_tokens=8)
    assert sample(registry, "vllm:prefix_cache_queries_total") == 10
    assert sample(registry, "vllm:prefix_cache_hits_total") == 2
    assert sample(registry, "vllm:external_prefix_cache_queries_total") == 8
    assert sample(registry, "vllm:external_prefix_cache_hits_total") == 6


def test_deadlines_and_failed_steps_are_counted(
    registry: CollectorRegistry, metrics: EngineMetrics, request_of_ten: Request, sample: Sample
) -> None:
    metrics.attach(registry)
    late = finish("error")._replace(error=GenerationTimeout("too late"))
    metrics.on_finish(request_of_ten, late)
    metrics.on_finish(request_of_ten, finish("error"))
    metrics.on_step_failure(plan("decode"), RuntimeError("boom"))
    assert sample(registry, "qwen3_asgi_request_timeouts_total") == 1
    assert sample(registry, "vllm:request_success_total", finished_reason="error") == 2
    assert sample(registry, "qwen3_asgi_step_failures_total") == 1


TOKENS = st.dictionaries(
    st.floats(0, 200) | st.sampled_from(INTER_TOKEN_BUCKETS), st.integers(1, 300), max_size=5
)


@given(TOKENS)
def test_observing_a_value_many_times_at_once_is_observing_it_many_times(
    intervals: dict[float, int],
) -> None:
    together, apart = (
        Histogram("h", "", ["label"], registry=None, buckets=INTER_TOKEN_BUCKETS) for _ in range(2)
    )
    observe, once = observe_many(together.labels("a")), apart.labels("a").observe
    for seconds, count in intervals.items():
        observe(seconds, count)
        for _ in range(count):
            once(seconds)
    for ours, theirs in zip(*(samples_of(each) for each in (together, apart)), strict=True):
        assert ours == pytest.approx(theirs)


def samples_of(histogram: Histogram) -> list[tuple[str, float]]:
    return [
        (sample.name + sample.labels.get("le", ""), sample.value)
        for metric in histogram.collect()
        for sample in metric.samples
        if not sample.name.endswith("_created")
    ]


def test_a_step_of_tokens_costs_no_observation_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Histogram, amount: float) -> None:
        raise AssertionError("one observation for each token")

    histogram = Histogram("h", "", registry=None, buckets=(1.0, 2.0))
    observe = observe_many(histogram)
    monkeypatch.setattr(Histogram, "observe", refuse)
    observe(1.5, 256)
    assert dict(samples_of(histogram))["h_count"] == 256


@pytest.mark.parametrize("field", ["_sum", "_buckets", "_upper_bounds"])
def test_a_histogram_with_other_fields_is_observed_token_by_token(field: str) -> None:
    class Changed(Histogram):
        """As if prometheus_client had renamed a field: it can't be found from outside."""

        observed: ClassVar[list[float]] = []

        def observe(self, amount: float, exemplar: dict[str, str] | None = None) -> None:
            self.observed.append(amount)

        def __getattribute__(self, name: str) -> Any:
            if name == field and self.__dict__.get("_ready"):
                raise AttributeError(name)
            return super().__getattribute__(name)

    histogram = Changed("h", "", registry=None, buckets=(1.0, 2.0))
    histogram.__dict__["_ready"] = True
    observe_many(histogram)(1.5, 3)
    assert Changed.observed == [1.5] * 3


def test_disconnects_and_wakeups_are_counted(
    registry: CollectorRegistry, metrics: EngineMetrics, sample: Sample
) -> None:
    metrics.attach(registry)
    metrics.on_client_disconnect("streaming")
    metrics.on_client_disconnect("streaming")
    metrics.on_wakeups(3)
    name = "qwen3_asgi_client_disconnects_total"
    assert sample(registry, name, phase="streaming") == 2
    assert sample(registry, "qwen3_asgi_event_loop_wakeups_total") == 3


snapshots = st.builds(
    LoadSnapshot,
    num_running=st.integers(0, 3),
    num_waiting=st.integers(4, 6),
    num_loading=st.integers(0, 2),
    num_held=st.integers(0, 2),
    num_adapters=st.integers(0, 2),
    kv_used_blocks=st.integers(0, 4),
    kv_total_blocks=st.sampled_from([0, 4, 8]),
)


@given(st.lists(snapshots, min_size=1))
def test_gauges_always_equal_the_last_snapshot_and_fall_to_zero_at_the_end(
    loads: list[LoadSnapshot],
) -> None:
    registry, metrics = CollectorRegistry(), EngineMetrics("tiny", "0")
    metrics.attach(registry)

    def gauges() -> list[float | None]:
        labels = {"model_name": "tiny", "engine": "0"}
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        return [
            *(registry.get_sample_value(f"vllm:{name}", labels) for name in names),
            registry.get_sample_value("qwen3_asgi_lora_adapters", labels),
            *(
                registry.get_sample_value(
                    "vllm:num_requests_waiting_by_reason", {**labels, "reason": reason}
                )
                for reason in ("capacity", "loading", "control")
            ),
        ]

    def wanted(load: LoadSnapshot) -> list[float]:
        capacity = load.num_waiting - load.num_loading - load.num_held
        return [
            load.num_running,
            load.num_waiting,
            load.kv_usage,
            load.num_adapters,
            capacity,
            load.num_loading,
            load.num_held,
        ]

    for load in loads:
        metrics.on_load(load)
        assert gauges() == wanted(load)
    metrics.close()
    metrics.close()
    assert gauges() == [0] * 7
    metrics.on_load(loads[-1])
    assert gauges() == wanted(loads[-1])


def test_a_failing_measurement_is_logged_once_and_never_raises(
    metrics: EngineMetrics, caplog: pytest.LogCaptureFixture
) -> None:
    request: Request = object()  # type: ignore[assignment]
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            metrics.on_admit(request, 0)
            metrics.on_tokens([(request, 0.1)], {})
            metrics.on_finish(request, finish("stop"))
    assert len(caplog.records) == 1


def test_a_step_without_rows_is_not_a_failure(
    metrics: EngineMetrics, caplog: pytest.LogCaptureFixture
) -> None:
    metrics.on_step(plan(), 0.1)
    assert not caplog.records
