"""The bytes of a scrape: both text formats, and one answer for several processes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families

from qwen3_asgi.metrics import CATALOGUE, EngineMetrics, render

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

PROMETHEUS_2 = (
    "application/openmetrics-text;version=1.0.0;q=0.5,application/openmetrics-text;version=0.0.1;"
    "q=0.4,text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
)
PROMETHEUS_3 = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.5,"
    "text/plain;version=1.0.0;escaping=allow-utf-8;q=0.3,text/plain;version=0.0.4;q=0.2,*/*;q=0.1"
)

DOC = Path(__file__).parents[2] / "docs" / "metrics.md"

# Counts the same work as every other worker, seen by two registries, one of them attached late.
WORKER = """
import os, sys
from prometheus_client import CollectorRegistry
from qwen3_asgi.metrics import EngineMetrics, render
from qwen3_asgi.scheduler.load import LoadSnapshot
from qwen3_asgi.scheduler.request import Request

used = int(sys.argv[1])
metrics, request = EngineMetrics("tiny", "0"), Request("r", range(10))
early, late = CollectorRegistry(), CollectorRegistry()
metrics.attach(early)
metrics.on_load(LoadSnapshot(num_running=used, kv_used_blocks=used, kv_total_blocks=8))
metrics.on_tokens([(request, 1.0)], {})
metrics.attach(late)
metrics.on_tokens([], {0.1: 1, 0.5: 255})
print(os.getpid())
print(render(late)[0].decode())
"""

# What a server does when a worker has ended, and then a scrape of another worker.
SCRAPE = """
import sys
from prometheus_client import CollectorRegistry
from prometheus_client.multiprocess import mark_process_dead
from qwen3_asgi.metrics import render

for pid in sys.argv[1:]:
    mark_process_dead(int(pid))
print(render(CollectorRegistry())[0].decode())
"""


def run(script: str, directory: Path, *args: str) -> str:
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(directory)}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script, *args],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def values(text: str) -> dict[str, float]:
    """The samples of engine 0 without further labels, by name; fails on repeated families."""
    types = re.findall(r"^# TYPE (\S+)", text, re.MULTILINE)
    assert len(types) == len(set(types))
    labels = {"model_name": "tiny", "engine": "0"}
    return {
        sample.name: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.labels == labels
    }


def test_without_an_accept_header_the_answer_is_the_classic_text_format(
    registry: CollectorRegistry, metrics: EngineMetrics
) -> None:
    metrics.attach(registry)
    for header in (None, "", "*/*", "text/plain"):
        body, content_type = render(registry, header)
        assert content_type.startswith("text/plain; version=0.0.4")
        assert b'\nvllm:prompt_tokens_total{engine="0",model_name="tiny"} 0.0\n' in body
    parsed = {family.name for family in text_string_to_metric_families(body.decode())}
    assert {family.name.removesuffix("_total") for family in CATALOGUE} <= parsed


def test_openmetrics_is_given_to_those_who_accept_it_with_names_unchanged(
    registry: CollectorRegistry, metrics: EngineMetrics
) -> None:
    metrics.attach(registry)
    EngineMetrics("tiny", "1").attach(registry)
    body, content_type = render(registry, PROMETHEUS_3)
    assert content_type.startswith("application/openmetrics-text; version=1.0.0")
    assert body.endswith(b"# EOF\n")
    families = parse_openmetrics(body.decode())  # type: ignore[no-untyped-call]
    assert [family.name for family in families] == [
        family.name.removesuffix("_total") for family in CATALOGUE
    ]


@pytest.mark.parametrize("header", [PROMETHEUS_2, PROMETHEUS_3, "application/openmetrics-text", ""])
def test_no_scraper_gets_other_names_than_the_catalogues(
    header: str, registry: CollectorRegistry, metrics: EngineMetrics
) -> None:
    metrics.attach(registry)
    lines = render(registry, header)[0].decode().splitlines()
    names = {re.split(r"[{ ]", line)[0] for line in lines if not line.startswith("#")}
    for family in CATALOGUE:
        wanted = {"histogram": "_bucket"}.get(family.kind, "")
        if family.own_labels != ("phase",):
            assert family.name + wanted in names


def test_label_values_are_escaped(registry: CollectorRegistry) -> None:
    name = 'a "quoted"\\path\nand a line'
    EngineMetrics(name, "0").attach(registry)
    parsed = text_string_to_metric_families(render(registry)[0].decode())
    assert {s.labels["model_name"] for family in parsed for s in family.samples} == {name}


def test_several_processes_answer_as_one(tmp_path: Path) -> None:
    pids = []
    for used in (2, 6):
        pid, text = run(WORKER, tmp_path, str(used)).split("\n", 1)
        pids.append(pid)
    found = values(text)
    assert found["vllm:num_requests_running"] == 2 + 6
    assert found["vllm:kv_cache_usage_perc"] == 6 / 8
    assert found["vllm:generation_tokens_total"] == 2 * 257
    assert found["vllm:prompt_tokens_total"] == 20
    assert found["vllm:time_to_first_token_seconds_count"] == 2
    assert found["vllm:inter_token_latency_seconds_count"] == 2 * 256
    assert found["vllm:inter_token_latency_seconds_sum"] == pytest.approx(2 * (0.1 + 0.5 * 255))

    found = values(run(SCRAPE, tmp_path, pids[1]))
    assert found["vllm:num_requests_running"] == 2
    assert found["vllm:kv_cache_usage_perc"] == 2 / 8
    assert found["vllm:generation_tokens_total"] == 2 * 257


def test_the_python_of_the_documentation_compiles() -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", DOC.read_text(encoding="utf-8"), re.M | re.S)
    assert blocks
    for block in blocks:
        compile(block, str(DOC), "exec")
