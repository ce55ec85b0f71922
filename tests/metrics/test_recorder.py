"""What each measurement adds to which series."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from qwen3_asgi.metrics import EngineMetrics
from qwen3_asgi.scheduler.events import Finish, FinishReason, SchedulerObserver
from qwen3_asgi.scheduler.load import LoadSnapshot
from qwen3_asgi.scheduler.plan import RequestId, Row, RowKind, StepPlan
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
    metrics.on_token(request_of_ten, 1.0, first=True)
    metrics.on_step(plan("decode"), 0.01)
    metrics.on_token(request_of_ten, 0.1, first=False)
    metrics.on_step(plan("decode", "prefill"), 0.03)
    metrics.on_token(request_of_ten, 0.1, first=False)
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
    for other in State:
        assert sample(registry, CANCELLED, state=other.value) == int(other is state)
    assert sample(registry, AVOIDED) == avoided
    assert sample(registry, "qwen3_asgi_wasted_tokens_total") == 2
    assert sample(registry, "qwen3_asgi_sweep_seconds_sum") == 0.0001


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
    num_waiting=st.integers(0, 3),
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
        return [registry.get_sample_value(f"vllm:{name}", labels) for name in names]

    for load in loads:
        metrics.on_load(load)
        assert gauges() == [load.num_running, load.num_waiting, load.kv_usage]
    metrics.close()
    metrics.close()
    assert gauges() == [0, 0, 0]
    metrics.on_load(loads[-1])
    assert gauges() == [loads[-1].num_running, loads[-1].num_waiting, loads[-1].kv_usage]


def test_a_failing_measurement_is_logged_once_and_never_raises(
    metrics: EngineMetrics, caplog: pytest.LogCaptureFixture
) -> None:
    request: Request = object()  # type: ignore[assignment]
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            metrics.on_admit(request, 0)
            metrics.on_token(request, 0.1, first=True)
            metrics.on_finish(request, finish("stop"))
    assert len(caplog.records) == 1


def test_a_step_without_rows_is_not_a_failure(
    metrics: EngineMetrics, caplog: pytest.LogCaptureFixture
) -> None:
    metrics.on_step(plan(), 0.1)
    assert not caplog.records
