"""Any registry, any number of times, at any moment, with any number of engines."""

from __future__ import annotations

import gc
import threading
import weakref
from collections import Counter as Occurrences
from typing import TYPE_CHECKING

import pytest
from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge
from prometheus_client.parser import text_string_to_metric_families

from qwen3_asgi.errors import Qwen3Error
from qwen3_asgi.metrics import (
    CATALOGUE,
    EngineMetrics,
    MetricLabelsTaken,
    MetricNameTaken,
    render,
)
from qwen3_asgi.scheduler.load import LoadSnapshot

if TYPE_CHECKING:
    from collections.abc import Iterator

    from qwen3_asgi.scheduler.request import Request
    from tests.metrics.conftest import Sample

RUNNING = "vllm:num_requests_running"
GENERATED = "vllm:generation_tokens_total"


@pytest.fixture
def default_registry(metrics: EngineMetrics) -> Iterator[CollectorRegistry]:
    yield REGISTRY
    metrics.detach(REGISTRY)


def assert_one_type_line_per_family(registry: CollectorRegistry) -> None:
    text = render(registry)[0].decode()
    names = Occurrences(line.split()[2] for line in text.splitlines() if line.startswith("# TYPE"))
    assert {family.name for family in CATALOGUE} <= set(names)
    assert set(names.values()) == {1}
    series = Occurrences(
        line.rsplit(" ", 1)[0] for line in text.splitlines() if not line.startswith("#")
    )
    assert set(series.values()) == {1}
    assert list(text_string_to_metric_families(text))


def test_attaching_twice_changes_nothing(
    registry: CollectorRegistry, metrics: EngineMetrics
) -> None:
    metrics.attach(registry)
    once = render(registry)
    metrics.attach(registry)
    assert render(registry) == once
    assert_one_type_line_per_family(registry)


def test_two_engines_share_the_families_of_a_registry(
    registry: CollectorRegistry, metrics: EngineMetrics, sample: Sample
) -> None:
    other = EngineMetrics("tiny", "1")
    metrics.attach(registry)
    other.attach(registry)
    metrics.on_load(LoadSnapshot(num_running=2))
    other.on_load(LoadSnapshot(num_running=5))
    assert sample(registry, RUNNING, "0") == 2
    assert sample(registry, RUNNING, "1") == 5
    assert_one_type_line_per_family(registry)
    metrics.close()
    assert sample(registry, RUNNING, "0") == 0
    assert sample(registry, RUNNING, "1") == 5


def test_a_private_and_the_default_registry_show_the_same_at_once(
    registry: CollectorRegistry,
    default_registry: CollectorRegistry,
    metrics: EngineMetrics,
    request_of_ten: Request,
    sample: Sample,
) -> None:
    metrics.attach(default_registry)
    metrics.attach(registry)
    metrics.on_load(LoadSnapshot(num_running=3))
    metrics.on_tokens([], {0.1: 1})
    for each in (registry, default_registry):
        assert sample(each, RUNNING) == 3
        assert sample(each, GENERATED) == 1
        assert_one_type_line_per_family(each)


def test_a_private_registry_shows_only_the_engines_attached_to_it(
    registry: CollectorRegistry, metrics: EngineMetrics
) -> None:
    other, elsewhere = EngineMetrics("tiny", "1"), CollectorRegistry()
    metrics.attach(registry)
    other.attach(elsewhere)
    assert b'engine="1"' not in render(registry)[0]
    assert b'engine="0"' not in render(elsewhere)[0]


def test_a_registry_attached_late_shows_everything_since_the_start(
    registry: CollectorRegistry, metrics: EngineMetrics, request_of_ten: Request
) -> None:
    early = CollectorRegistry()
    metrics.attach(early)
    metrics.on_load(LoadSnapshot(num_running=1, num_waiting=2))
    metrics.on_tokens([(request_of_ten, 1.0)], {})
    metrics.on_tokens([], {0.1: 1})
    metrics.attach(registry)
    assert render(registry) == render(early)


def test_a_detached_engine_leaves_the_others_alone_and_can_come_back(
    registry: CollectorRegistry, metrics: EngineMetrics, request_of_ten: Request, sample: Sample
) -> None:
    other = EngineMetrics("tiny", "1")
    metrics.detach(registry)
    metrics.attach(registry)
    other.attach(registry)
    metrics.on_tokens([], {0.1: 1})
    metrics.detach(registry)
    metrics.detach(registry)
    text = render(registry)[0]
    assert b'engine="0"' not in text
    assert b'engine="1"' in text
    metrics.attach(registry)
    assert sample(registry, GENERATED) == 1


def test_two_engines_with_the_same_labels_are_refused_with_the_reason(
    registry: CollectorRegistry, metrics: EngineMetrics
) -> None:
    twin = EngineMetrics("tiny", "0")
    metrics.attach(registry)
    with pytest.raises(MetricLabelsTaken, match='model_name="tiny", engine="0"'):
        twin.attach(registry)
    metrics.detach(registry)
    twin.attach(registry)


@pytest.mark.parametrize("name", [RUNNING, GENERATED, "vllm:time_to_first_token_seconds_sum"])
def test_a_foreign_metric_under_our_name_gives_a_clear_error_and_registers_nothing(
    name: str, registry: CollectorRegistry, metrics: EngineMetrics
) -> None:
    foreign = Gauge(name, "somebody else's", registry=registry)
    before = render(registry)
    with pytest.raises(MetricNameTaken, match=f"not ours under our names .*{name}") as caught:
        metrics.attach(registry)
    assert isinstance(caught.value, Qwen3Error)
    assert render(registry) == before
    registry.unregister(foreign)
    metrics.attach(registry)
    assert_one_type_line_per_family(registry)


def test_a_foreign_metric_that_comes_later_is_refused_by_the_registry(
    registry: CollectorRegistry, metrics: EngineMetrics
) -> None:
    metrics.attach(registry)
    with pytest.raises(ValueError, match="Duplicated timeseries"):
        Counter(GENERATED, "somebody else's", registry=registry)


def test_an_emptied_registry_is_filled_again_by_attaching(
    registry: CollectorRegistry, metrics: EngineMetrics
) -> None:
    metrics.attach(registry)
    for collector in list(registry._collector_to_names):
        registry.unregister(collector)
    assert render(registry)[0] == b""
    metrics.attach(registry)
    assert_one_type_line_per_family(registry)


def test_a_restricted_registry_shows_one_family(
    registry: CollectorRegistry, metrics: EngineMetrics
) -> None:
    metrics.attach(registry)
    restricted = registry.restricted_registry([RUNNING])
    assert [metric.name for metric in restricted.collect()] == [RUNNING]


def test_a_registry_is_not_kept_alive(metrics: EngineMetrics) -> None:
    registry = CollectorRegistry()
    metrics.attach(registry)
    reference = weakref.ref(registry)
    del registry
    gc.collect()
    assert reference() is None


def test_attaching_and_scraping_from_many_threads_while_tokens_are_counted_loses_nothing(
    registry: CollectorRegistry, metrics: EngineMetrics, request_of_ten: Request, sample: Sample
) -> None:
    num_tokens, done = 20_000, threading.Event()
    errors: list[BaseException] = []
    late: list[CollectorRegistry] = []

    def hammer(label: str) -> None:
        other = EngineMetrics("tiny", label)
        try:
            while not done.is_set():
                private = CollectorRegistry()
                for attached in (metrics, other):
                    attached.attach(registry)
                    attached.attach(private)
                render(registry)
                other.detach(registry)
                late[:] = [private]
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=hammer, args=(f"other-{i}",)) for i in range(4)]
    for thread in threads:
        thread.start()
    for i in range(num_tokens):
        metrics.on_tokens([], {0.02: 1})
        metrics.on_load(LoadSnapshot(num_running=i % 7))
    done.set()
    for thread in threads:
        thread.join()
    assert not errors
    for each in (registry, *late):
        assert sample(each, GENERATED) == num_tokens
        assert sample(each, "vllm:inter_token_latency_seconds_count") == num_tokens
        assert sample(each, RUNNING) == (num_tokens - 1) % 7
    assert_one_type_line_per_family(registry)


def test_counts_from_many_threads_add_up(
    registry: CollectorRegistry, metrics: EngineMetrics, sample: Sample
) -> None:
    metrics.attach(registry)

    def count() -> None:
        for _ in range(1000):
            metrics.on_wakeups(2)
            metrics.on_client_disconnect("streaming")

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sample(registry, "qwen3_asgi_event_loop_wakeups_total") == 8000
    name = "qwen3_asgi_client_disconnects_total"
    assert sample(registry, name, phase="streaming") == 4000
