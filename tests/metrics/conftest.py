"""A scripted request, and a way to read a sample that fails when there is none."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from prometheus_client import CollectorRegistry

from qwen3_asgi.metrics import EngineMetrics
from qwen3_asgi.scheduler.request import Request

Sample = Callable[..., float]


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def metrics() -> EngineMetrics:
    return EngineMetrics("tiny", "0")


@pytest.fixture
def request_of_ten() -> Request:
    """Ten prompt tokens, arrived at 100.0, admitted at 100.5, tokens at 101.0, 101.1 and 101.2."""
    request = Request("r", range(10), arrival=100.0)
    request.admitted_at, request.first_token_at, request.last_token_at = 100.5, 101.0, 101.2
    return request


@pytest.fixture
def sample() -> Sample:
    def read(registry: CollectorRegistry, name: str, engine: str = "0", **own: str) -> float:
        labels = {"model_name": "tiny", "engine": engine, **own}
        value = registry.get_sample_value(name, labels)
        assert value is not None, f"no sample {name}{labels}"
        return value

    return read
