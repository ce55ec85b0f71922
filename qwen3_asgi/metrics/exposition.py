"""A registry in, the bytes of a scrape out. Called by the route `/metrics`."""

from __future__ import annotations

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from prometheus_client.multiprocess import MultiProcessCollector

from qwen3_asgi.metrics.instruments import multiprocess_mode

_OPENMETRICS = "application/openmetrics-text"
_NAMES_UNCHANGED = "escaping=allow-utf-8"


def render(registry: CollectorRegistry, accept_header: str | None = None) -> tuple[bytes, str]:
    """Return the body and its content type, in the format that the `Accept` header asks for.

    In prometheus_client's multiprocess mode the answer is the sum over all processes, read from
    their files, whatever the registry holds: a registry knows this process only.
    """
    encode, content_type = choose_encoder(accept_header or "")
    if content_type.startswith(_OPENMETRICS) and _NAMES_UNCHANGED not in content_type:
        # With any other escaping prometheus_client writes `vllm_` for `vllm:` in OpenMetrics, and
        # no dashboard finds it: https://github.com/prometheus/client_python/issues/1177
        encode, content_type = choose_encoder("")
    return encode(_all_processes() if multiprocess_mode() else registry), content_type


def _all_processes() -> CollectorRegistry:
    registry = CollectorRegistry()
    MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
    return registry
