"""`timeout` and `priority` over HTTP, and what a client is told who has to come back later."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anyio
import httpx
import openai
import pytest

from qwen3_asgi.app import create_app
from qwen3_asgi.config import EngineConfig
from qwen3_asgi.errors import GenerationTimeout
from tests.asgi.scripted import ScriptedEngine, client, events
from tests.engine.engines import Gate, executor, running, tokens, toy_engine
from tests.openai.batches import batches, body

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from qwen3_asgi.engine.engine import Engine

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
ROUTES = [
    (CHAT, body(messages=[{"role": "user", "content": "hi"}])),
    (COMPLETIONS, body(prompt="hi")),
]


@pytest.mark.parametrize(("path", "payload"), ROUTES)
async def test_a_timeout_goes_to_the_engine(path: str, payload: dict[str, Any]) -> None:
    engine = ScriptedEngine()
    async with client(engine) as http:
        for seconds in (5, 0.5):
            await http.post(path, json=payload | {"timeout": seconds})
    assert [asked["timeout"] for asked in engine.submitted] == [5, 0.5]


@pytest.mark.parametrize(("path", "payload"), ROUTES)
async def test_a_request_whose_time_is_up_is_a_504_that_nobody_repeats(
    path: str, payload: dict[str, Any]
) -> None:
    engine = ScriptedEngine([[batches("a", "b")[0], GenerationTimeout("too late")]])
    async with client(engine) as http:
        response = await http.post(path, json=payload)
        stream = await http.post(path, json=payload | {"stream": True})
    error = {
        "message": "too late",
        "type": "timeout_error",
        "param": None,
        "code": "generation_timeout",
    }
    assert response.status_code == 504
    assert response.json() == {"error": error}
    assert "retry-after" not in response.headers
    assert stream.status_code == 200
    *_, last = events(stream.text)
    assert last == {"error": error}


async def test_the_official_client_does_not_repeat_it(anyio_backend_name: str) -> None:
    if anyio_backend_name == "trio":
        pytest.skip("the client leaves async generators to the collector, of which trio warns")
    engine = ScriptedEngine([GenerationTimeout("too late")])
    http: Any = httpx.AsyncClient(transport=httpx.ASGITransport(create_app(engine, metrics=False)))
    async with (
        http,
        openai.AsyncOpenAI(base_url="http://test/v1", api_key="k", http_client=http) as official,
    ):
        with pytest.raises(openai.APIStatusError) as caught:
            await official.completions.create(model="toy", prompt="hi")
    assert caught.value.status_code == 504
    assert len(engine.submitted) == 1


@pytest.mark.parametrize(("path", "payload"), ROUTES)
@pytest.mark.parametrize("value", [0, -1, 1e400])
async def test_a_wrong_timeout_is_refused(path: str, payload: dict[str, Any], value: float) -> None:
    async with running(toy_engine(config=EngineConfig(served_model_name="toy"))) as engine:
        async with client_of(engine) as http:
            text = str(httpx.Request("POST", "http://test", json=payload).content, "utf-8")
            shown = "1e400" if value > 1 else str(value)
            response = await http.post(path, content=f'{text[:-1]},"timeout":{shown}}}')
        assert response.status_code == 400
        assert engine.state == "new"


def client_of(engine: Engine) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(create_app(engine, metrics=False))
    return httpx.AsyncClient(transport=transport, base_url="http://test")


@pytest.fixture
async def late() -> AsyncIterator[Engine]:
    config = EngineConfig(served_model_name="toy")
    async with running(toy_engine(config=config)) as engine:
        yield engine


@pytest.mark.parametrize(("path", "payload"), ROUTES)
@pytest.mark.parametrize("stream", [False, True])
async def test_it_ends_in_the_scheduler(
    late: Engine, path: str, payload: dict[str, Any], stream: bool
) -> None:
    await late.start()
    async with client_of(late) as http:
        # Such a deadline has passed before anybody can look.
        response = await http.post(path, json=payload | {"timeout": 1e-9, "stream": stream})
    last = events(response.text)[-1] if stream else response.json()
    assert last["error"]["code"] == "generation_timeout"
    assert response.status_code == (200 if stream else 504)


@pytest.mark.parametrize(("path", "payload"), ROUTES)
async def test_a_client_can_only_overtake_others_where_the_host_lets_it(
    path: str, payload: dict[str, Any]
) -> None:
    engine = ScriptedEngine()
    async with client(engine) as http:
        for priority in (-1, 1):
            refused = await http.post(path, json=payload | {"priority": priority})
            assert refused.status_code == 400
            error = refused.json()["error"]
            assert (error["param"], error["code"]) == ("priority", "unsupported_parameter")
        assert (await http.post(path, json=payload | {"priority": 0})).status_code == 200
        assert (await http.post(path, json=payload | {"priority": None})).status_code == 200
    assert [asked["priority"] for asked in engine.submitted] == [0, 0]
    engine = ScriptedEngine()
    async with client(engine, allow_priority=True) as http:
        assert (await http.post(path, json=payload | {"priority": -1})).status_code == 200
    assert engine.submitted[0]["priority"] == -1


async def test_a_full_or_draining_engine_says_when_to_come_back() -> None:
    fake = executor()
    gate = Gate(fake)
    config = EngineConfig(served_model_name="toy", max_batch=1, max_queue_tokens=8)
    async with running(toy_engine(fake, config), gate) as engine, client_of(engine) as http:
        handle = await engine.submit(prompt_token_ids=[1] * 8, params=tokens(2))
        await gate.held(1)
        full = await http.post(COMPLETIONS, json=body(prompt="hi"))
        assert full.status_code == 429
        assert full.json()["error"]["code"] == "engine_overloaded"
        assert int(full.headers["retry-after"]) >= 1
        async with anyio.create_task_group() as group:
            group.start_soon(lambda: engine.stop(drain=20))
            while engine.state != "draining":
                await anyio.lowlevel.checkpoint()
            draining = await http.post(COMPLETIONS, json=body(prompt="hi"))
            gate.open()
        assert draining.status_code == 503
        assert draining.json()["error"]["code"] == "engine_not_ready"
        assert int(draining.headers["retry-after"]) >= 1
        assert len([t async for batch in handle for t in batch.tokens]) == 2
