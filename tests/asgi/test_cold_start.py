"""The app on an engine whose model is being loaded: what clients and probes are told."""

from __future__ import annotations

import anyio
import anyio.lowlevel
import httpx
import pytest
from prometheus_client import CollectorRegistry

from qwen3_asgi import DisconnectMiddleware
from qwen3_asgi.app import create_app
from qwen3_asgi.config import EngineConfig
from qwen3_asgi.engine.engine import Engine
from qwen3_asgi.testing import DisconnectingASGITransport
from tests.engine.engines import GUARD_SECONDS, quiet, running
from tests.engine.loader import Door, Loader

pytestmark = pytest.mark.anyio

PROMPT = {"model": "toy", "prompt": "hello", "max_tokens": 3, "ignore_eos": True}


def http(engine: Engine) -> httpx.AsyncClient:
    app = DisconnectMiddleware(create_app(engine, registry=CollectorRegistry()))
    return httpx.AsyncClient(
        transport=DisconnectingASGITransport(app), base_url="http://test", timeout=GUARD_SECONDS
    )


@pytest.mark.parametrize("stream", [False, True])
async def test_a_refused_request_is_a_503_in_openais_shape_with_retry_after(stream: bool) -> None:
    door = Door()
    config = EngineConfig(cold_start="refuse")
    async with running(Engine("toy", config, loader=Loader(door.wait))) as engine:
        answers: list[httpx.Response] = []

        async def begin(client: httpx.AsyncClient) -> None:
            answers.append(await client.post("/v1/completions", json=PROMPT))

        with anyio.fail_after(GUARD_SECONDS):
            async with http(engine) as client, anyio.create_task_group() as group:
                group.start_soon(begin, client)
                while engine.state == "new":
                    await anyio.lowlevel.checkpoint()
                refused = await client.post("/v1/completions", json={**PROMPT, "stream": stream})
                assert refused.status_code == 503
                assert refused.headers["retry-after"] == "1"
                assert refused.headers["content-type"] == "application/json"
                assert refused.json()["error"] == {
                    "message": "the engine is not ready: the model is being loaded",
                    "type": "server_error",
                    "param": None,
                    "code": "engine_not_ready",
                }
                ready = await client.get("/ready")
                assert (ready.status_code, ready.headers["retry-after"]) == (503, "1")
                assert (await client.get("/health")).status_code == 200
                assert answers == []
                door.open()
        assert [answer.status_code for answer in answers] == [200]
        assert answers[0].json()["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_hangs_up_during_the_start_costs_no_step(stream: bool) -> None:
    door = Door()
    loader = Loader(door.wait)
    async with running(Engine("toy", loader=loader)) as engine:
        with anyio.fail_after(GUARD_SECONDS):
            async with http(engine) as client:
                async with anyio.create_task_group() as group:
                    group.start_soon(_post, client, {**PROMPT, "stream": stream})
                    while engine.state == "new":
                        await anyio.lowlevel.checkpoint()
                    await quiet()
                    group.cancel_scope.cancel()
                assert engine.state == "starting"
                door.open()
                stays = await client.post("/v1/completions", json={**PROMPT, "prompt": "other"})
        assert stays.status_code == 200
        [model] = loader.loaded
        rows = model.executor.rows  # type: ignore[attr-defined]
        assert len({row.request_id for row in rows}) == 1
        assert len(rows) == 3


async def test_the_readiness_probe_starts_a_new_engine_and_then_reports_it() -> None:
    loader = Loader()
    async with running(Engine("toy", loader=loader)) as engine:
        with anyio.fail_after(GUARD_SECONDS):
            async with http(engine) as client:
                assert (await client.get("/health")).status_code == 200
                assert (engine.state, loader.calls) == ("new", 0)
                while (await client.get("/ready")).status_code != 200:
                    await anyio.lowlevel.checkpoint()
                assert (engine.state, loader.calls) == ("ready", 1)
                await engine.stop()
                stopped = await client.get("/ready")
                assert stopped.json()["error"]["message"] == "the engine is not ready: stopped"
                assert (await client.get("/health")).status_code == 200
                refused = await client.post("/v1/completions", json=PROMPT)
                assert (refused.status_code, loader.calls) == (503, 1)


async def _post(client: httpx.AsyncClient, body: dict[str, object]) -> None:
    await client.post("/v1/completions", json=body)
    raise AssertionError("answered")
