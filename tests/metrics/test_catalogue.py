"""The catalogue is the one source: of the exposed names, and of the documentation's tables."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from prometheus_client.parser import text_string_to_metric_families

from qwen3_asgi.metrics import CATALOGUE, EngineMetrics, catalogue, catalogue_markdown, render
from qwen3_asgi.metrics.catalogue import Family, GaugeFamily, HistogramFamily

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

DOC = Path(__file__).parents[2] / "docs" / "metrics.md"

VLLM_NAMES = {
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:num_requests_waiting_by_reason",
    "vllm:kv_cache_usage_perc",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:request_success_total",
    "vllm:prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total",
    "vllm:external_prefix_cache_queries_total",
    "vllm:external_prefix_cache_hits_total",
    "vllm:num_preemptions_total",
    "vllm:time_to_first_token_seconds",
    "vllm:inter_token_latency_seconds",
    "vllm:e2e_request_latency_seconds",
    "vllm:request_queue_time_seconds",
    "vllm:request_prefill_time_seconds",
    "vllm:request_decode_time_seconds",
}


def test_every_family_of_the_module_is_in_the_catalogue_once() -> None:
    declared = [value for value in vars(catalogue).values() if isinstance(value, Family)]
    assert sorted(family.name for family in declared) == sorted(f.name for f in CATALOGUE)
    assert len({family.name for family in CATALOGUE}) == len(CATALOGUE)


def test_names_are_those_of_vllm_or_begin_with_our_prefix() -> None:
    names = {family.name for family in CATALOGUE}
    assert {name for name in names if name.startswith("vllm:")} == VLLM_NAMES
    assert all(name.startswith("qwen3_asgi_") for name in names - VLLM_NAMES)


def test_counters_end_in_total_and_histograms_in_seconds() -> None:
    for family in CATALOGUE:
        assert family.name.endswith("_total") == (family.kind == "counter")
        assert family.name.endswith("_seconds") == (family.kind == "histogram")


def test_buckets_rise() -> None:
    for family in CATALOGUE:
        if isinstance(family, HistogramFamily):
            assert list(family.buckets) == sorted(set(family.buckets))


def test_gauges_of_dead_processes_do_not_count() -> None:
    modes = {f.multiprocess_mode for f in CATALOGUE if isinstance(f, GaugeFamily)}
    assert all(mode.startswith("live") for mode in modes)


def test_exposed_types_and_names_are_exactly_the_catalogues(
    registry: CollectorRegistry, metrics: EngineMetrics
) -> None:
    metrics.on_client_disconnect("streaming")
    metrics.attach(registry)
    text = render(registry)[0].decode()
    types = [line.split()[2:] for line in text.splitlines() if line.startswith("# TYPE")]
    ours = [(name, kind) for name, kind in types if not name.endswith("_created")]
    assert ours == [(family.name, family.kind) for family in CATALOGUE]
    for family in CATALOGUE:
        assert f"# HELP {family.name} {family.help}\n" in text
        first = f"{family.name}_count" if family.kind == "histogram" else family.name
        assert any(line.startswith(first + "{") for line in text.splitlines()), first


def test_every_sample_has_the_labels_of_its_family(
    registry: CollectorRegistry, metrics: EngineMetrics
) -> None:
    metrics.attach(registry)
    labels = {family.name.removesuffix("_total"): set(family.labels) for family in CATALOGUE}
    parsed = list(text_string_to_metric_families(render(registry)[0].decode()))
    for family in parsed:
        for sample in family.samples:
            name = family.name.removesuffix("_created")
            assert set(sample.labels) - {"le"} == labels[name]


def test_the_documentation_holds_the_catalogues_tables() -> None:
    text = DOC.read_text(encoding="utf-8")
    begin, end = "<!-- catalogue: begin -->\n", "\n<!-- catalogue: end -->"
    assert text.split(begin)[1].split(end)[0] == catalogue_markdown()


def test_importing_the_metrics_loads_only_prometheus_client_and_the_scheduler() -> None:
    script = (
        "import sys, qwen3_asgi.metrics\n"
        "print(*sorted({n.split('.')[0] for n in sys.modules} & "
        "{'torch', 'transformers', 'starlette', 'anyio', 'pydantic', 'tokenizers', 'numpy'}))\n"
        "print(*sorted({n.split('.')[1] for n in sys.modules if n.startswith('qwen3_asgi.')}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    third_party, ours = done.stdout.splitlines()
    assert third_party == ""
    assert set(ours.split()) <= {"errors", "metrics", "scheduler"}
