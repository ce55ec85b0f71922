"""The routes that tell about the server, the shape of every refusal, keys and request ids."""

from __future__ import annotations

from typing import Any

import anyio
import httpx
import pytest
from openai.types import Model
from prometheus_client import REGISTRY, CollectorRegistry, Gauge
from starlette.applications import Starlette
from starlette.routing import Mount

from qwen3_asgi import __version__
from qwen3_asgi.app import create_app
from qwen3_asgi.errors import ClientDisconnected
from tests.asgi.scripted import ScriptedEngine, client
from tests.openai.batches import body

pytestmark = pytest.mark.anyio

CHAT = body(messages=[{"role": "user", "content": "hi"}])


async def test_models() -> None:
    async with client(ScriptedEngine(model_name="Qwen/Qwen3-4B")) as http:
        listed = (await http.get("/v1/models")).json()
        one = await http.get("/v1/models/Qwen/Qwen3-4B")
        other = await http.get("/v1/models/other")
    assert listed["object"] == "list"
    [model] = listed["data"]
    assert Model.model_validate(model).id == "Qwen/Qwen3-4B"
    assert one.json() == model
    assert other.status_code == 404
    assert other.json()["error"]["code"] == "model_not_found"


@pytest.mark.parametrize(
    ("state", "health", "ready"),
    [
        ("new", 200, 503),
        ("starting", 200, 503),
        ("ready", 200, 200),
        ("draining", 200, 503),
        ("stopped", 200, 503),
        ("dead", 503, 503),
    ],
)
async def test_health_and_readiness(state: str, health: int, ready: int) -> None:
    engine = ScriptedEngine(state=state)
    async with client(engine) as http:
        for path, status in (("/health", health), ("/ready", ready)):
            response = await http.get(path)
            assert response.status_code == status
            assert ("retry-after" in response.headers) == (status == 503)
            if status == 200:
                assert response.json() == {"status": "ok" if path == "/health" else "ready"}
    assert engine.submitted == []
    assert engine.starts_asked == (1 if state == "new" else 0)  # by /ready, never by /health


async def test_a_stalled_engine_is_told_of_and_not_replaced() -> None:
    async with client(ScriptedEngine(stalled_seconds=41.7)) as http:
        health = await http.get("/health")
        assert (await http.get("/ready")).status_code == 200
    assert health.status_code == 200
    assert health.json() == {
        "status": "stalled",
        "detail": "a step has been running for 42 s",
    }


async def test_load_and_version() -> None:
    async with client(ScriptedEngine()) as http:
        load = (await http.get("/load")).json()
        version = (await http.get("/version")).json()
    assert load == {
        "num_running": 2,
        "num_waiting": 0,
        "num_loading": 0,
        "num_held": 0,
        "num_adapters": 0,
        "waiting_tokens": 0,
        "finish_rate": 0.0,
        "kv_used_blocks": 1,
        "kv_cached_blocks": 0,
        "kv_total_blocks": 4,
        "iteration": 0,
        "step": 0,
        "kv_usage": 0.25,
    }
    assert version == {"version": __version__}


async def test_metrics_of_a_registry_in_both_formats() -> None:
    registry = CollectorRegistry()
    Gauge("answer", "help", registry=registry).set(42)
    engine = ScriptedEngine()
    async with client(engine, registry=registry) as http:
        text = await http.get("/metrics")
        accept = "application/openmetrics-text; version=1.0.0; escaping=allow-utf-8"
        openmetrics = await http.get("/metrics", headers={"accept": accept})
    assert engine.registries == [registry]
    assert text.status_code == 200
    assert text.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert "answer 42.0\n" in text.text
    assert openmetrics.headers["content-type"].startswith("application/openmetrics-text")
    assert openmetrics.text.endswith("# EOF\n")


async def test_metrics_use_the_default_registry_and_can_be_left_out() -> None:
    engine = ScriptedEngine()
    create_app(engine)
    assert engine.registries == [REGISTRY]
    async with client(engine, metrics=False) as http:
        assert (await http.get("/metrics")).status_code == 404
    assert engine.registries == [REGISTRY]


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nothing", 404, "not_found"),
        ("GET", "/", 404, "not_found"),
        ("GET", "/health/", 404, "not_found"),
        ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
        ("POST", "/v1/models", 405, "method_not_allowed"),
        ("DELETE", "/metrics", 405, "method_not_allowed"),
    ],
)
async def test_other_paths_and_methods_are_refused_in_the_same_shape(
    method: str, path: str, status: int, code: str
) -> None:
    async with client(ScriptedEngine()) as http:
        response = await http.request(method, path)
    assert response.status_code == status
    error = response.json()["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", code)
    assert ("allow" in response.headers) == (status == 405)


async def test_it_works_under_a_mount() -> None:
    host = Starlette(routes=[Mount("/llm", create_app(ScriptedEngine(), metrics=False))])
    transport = httpx.ASGITransport(host)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        assert (await http.post("/llm/v1/chat/completions", json=CHAT)).status_code == 200
        assert (await http.get("/llm/v1/models/toy")).status_code == 200
        missing = await http.get("/llm/nothing")
    assert missing.json()["error"]["code"] == "not_found"


# ---- keys ----

GUARDED = ["/v1/models", "/v1/models/toy", "/load", "/version", "/metrics"]


@pytest.mark.parametrize(
    ("header", "status"),
    [
        ("Bearer secret", 200),
        ("bearer  secret", 200),
        ("Bearer other", 200),
        ("Bearer secre", 401),
        ("Bearer ", 401),
        ("Basic secret", 401),
        ("secret", 401),
        (None, 401),
    ],
)
async def test_a_key_is_asked_for(header: str | None, status: int) -> None:
    headers = {} if header is None else {"authorization": header}
    async with client(ScriptedEngine(), api_key=["secret", "other"]) as http:
        for path in GUARDED:
            assert (await http.get(path, headers=headers)).status_code == status
        for path in ("/v1/chat/completions", "/v1/completions"):
            payload = CHAT if "chat" in path else body(prompt="x")
            response = await http.post(path, headers=headers, json=payload)
            assert response.status_code == status
        for path in ("/health", "/ready"):
            assert (await http.get(path, headers=headers)).status_code == 200
    if status == 401:
        assert response.json()["error"]["code"] == "invalid_api_key"
        assert response.headers["www-authenticate"] == "Bearer"


async def test_a_key_may_have_any_characters_and_the_header_any_bytes() -> None:
    async with client(ScriptedEngine(), api_key="schlüssel") as http:
        for value, status in (("schlüssel".encode(), 200), (b"\xff\xfe", 401)):
            response = await http.get("/load", headers={b"authorization": b"Bearer " + value})
            assert response.status_code == status


@pytest.mark.parametrize("api_key", ["", [], ["a", ""]])
def test_an_empty_key_is_a_mistake(api_key: Any) -> None:
    with pytest.raises(ValueError, match="api_key"):
        create_app(ScriptedEngine(), metrics=False, api_key=api_key)


# ---- request ids ----


@pytest.mark.parametrize(
    ("given", "echoed"),
    [
        ("abc-123", "abc-123"),
        ("x" * 128, "x" * 128),
        ("x" * 129, None),
        ("a b", None),
        ("", None),
        (None, None),
    ],
)
async def test_a_request_id_is_echoed_if_it_is_harmless(
    given: str | None, echoed: str | None
) -> None:
    headers = {} if given is None else {"x-request-id": given}
    async with client(ScriptedEngine()) as http:
        for response in (
            await http.get("/health", headers=headers),
            await http.get("/nothing", headers=headers),
            await http.post("/v1/chat/completions", headers=headers, json=CHAT),
        ):
            assert response.headers.get("x-request-id") == echoed


async def test_the_same_request_id_twice_is_two_requests() -> None:
    engine = ScriptedEngine()
    async with client(engine) as http, anyio.create_task_group() as group:
        for _ in range(2):
            group.start_soon(
                lambda: http.post(
                    "/v1/chat/completions", json=CHAT, headers={"x-request-id": "same"}
                )
            )
    assert len(engine.submitted) == 2
    assert all("request_id" not in asked for asked in engine.submitted)


async def test_a_client_that_left_is_no_error_reply() -> None:
    """Nobody reads it; how the watch ends the exchange is the watch's own test."""
    engine = ScriptedEngine([ClientDisconnected("gone")])
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/chat/completions",
        "root_path": "",
        "query_string": b"",
        "headers": [],
    }
    with anyio.fail_after(5):
        await create_app(engine, metrics=False)(scope, receive, send)
    assert not any(message.get("body") for message in sent)
    assert engine.submitted == []
