"""The engine's gauges in the `/metrics` that a host has anyway: once, right, 0 after a storm."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.hosts.counters import live
from tests.hosts.server import Server, serve, wait_until

if TYPE_CHECKING:
    from prometheus_client.samples import Sample

LONG = {"prompt": "a story for one who leaves", "max_tokens": 3000}
OWN = ["/generate", "/sync"]
MOUNTED = "/llm/v1/completions"
# Factory -> the host's own counter of answers, and its label for the status.
HOSTS = {
    "make_instrumentator": ("http_requests_total", "status"),
    "make_exporter": ("starlette_requests_total", "status_code"),
    "make_django": ("django_http_responses_total_by_status_total", "status"),
}


def samples(server: Server, path: str = "/metrics", accept: str = "*/*") -> list[Sample]:
    answer = server.client.get(path, headers={"accept": accept}).raise_for_status()
    assert answer.headers["content-type"].startswith("text/plain")
    families = text_string_to_metric_families(answer.text)
    return [sample for family in families for sample in family.samples]


def ours(server: Server, path: str = "/metrics") -> dict[tuple[str, str], float]:
    """All series of the engine but what only counts the scheduler's time.

    Raises:
        AssertionError: a series is there twice.
    """
    found = [
        sample
        for sample in samples(server, path)
        if sample.name.startswith(("vllm:", "qwen3_asgi_"))
    ]
    names = Counter((sample.name, str(sorted(sample.labels.items()))) for sample in found)
    assert set(names.values()) == {1}, [name for name in names if names[name] > 1]
    return {(s.name, str(sorted(s.labels.items()))): s.value for s in found}


def total(server: Server, name: str, **labels: str) -> float:
    return sum(
        sample.value
        for sample in samples(server)
        if sample.name == name and labels.items() <= sample.labels.items()
    )


@pytest.mark.parametrize("host", HOSTS)
def test_the_hosts_metrics_show_the_engine(host: str) -> None:
    with serve(f"tests.hosts.apps.metrics_host:{host}", factory=True) as server:
        # One each before any storm, so that a warm-up of the host's is not counted below.
        for path in OWN:
            assert server.post(path, {"prompt": "x", "max_tokens": 2}).status_code == 200
        with ExitStack() as clients:
            for path in OWN * 2:
                clients.enter_context(server.send("POST", path, LONG))
            for streams in (True, False):
                body = {**LONG, "model": "fake", "stream": streams}
                clients.enter_context(server.send("POST", MOUNTED, body))
            wait_until(lambda: live(server) == 6, "all run or wait")
            server.get("/stage/hold")
            running = total(server, "vllm:num_requests_running")
            assert running + total(server, "vllm:num_requests_waiting") == 6
            assert running > 0
            assert total(server, "vllm:kv_cache_usage_perc") > 0
        wait_until(
            lambda: total(server, "qwen3_asgi_client_disconnects_total") == 6, "all are noticed"
        )
        server.get("/stage/release")
        server.wait_idle()

        for gauge in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
            assert total(server, f"vllm:{gauge}") == 0, gauge
        assert total(server, "vllm:request_success_total", finished_reason="abort") == 6
        assert ours(server) == ours(server, "/llm/metrics")
        text = server.get("/metrics").text
        assert text.count("# TYPE vllm:num_requests_running gauge\n") == 1
        # What Prometheus sends. They answer in the plain format nevertheless, names unchanged.
        accept = "application/openmetrics-text;version=1.0.0,text/plain;q=0.5"
        assert "vllm:num_requests_running" in {s.name for s in samples(server, accept=accept)}

        counter, label = HOSTS[host]
        assert total(server, counter, **{label: "200"}) >= len(OWN)
        assert total(server, counter, **{label: "500"}) == 0
        if host != "make_django":  # which may have cancelled the view before it answers
            gone = {label: "499"}
            wait_until(lambda: total(server, counter, **gone) >= 4, "the gone are counted as 499")
        assert server.post("/generate", {"prompt": "x", "max_tokens": 2}).status_code == 200
        server.wait_idle()
        server.stop_cleanly()
        assert "ERROR" not in server.log
