"""The routes on a real engine (real scheduler and bridge, fake executor): the seams fit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anyio
import httpx
import pytest

from qwen3_asgi.app import create_app
from qwen3_asgi.config import EngineConfig
from qwen3_asgi.testing import (
    DisconnectingASGITransport,
    FakeExecutor,
    StepGate,
    assert_idle_async,
    fake_engine,
)
from tests.asgi.scripted import call, events
from tests.openai.batches import body
from tests.text.toy import toy_tokenizer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from qwen3_asgi.engine.engine import Engine

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"


def chat(**fields: Any) -> dict[str, Any]:
    return body(messages=[{"role": "user", "content": "hi"}], max_tokens=20) | fields


@pytest.fixture
def gate() -> StepGate:
    return StepGate()


@pytest.fixture
async def engine(gate: StepGate) -> AsyncIterator[Engine]:
    executor = FakeExecutor(num_kv_blocks=64, block_size=16, vocab_size=256, gate=gate)
    config = EngineConfig(served_model_name="toy")
    engine = fake_engine(executor, config, tokenizer=toy_tokenizer(), eos_token_ids=())
    try:
        yield engine
    finally:
        await engine.stop(drain=5)


async def test_a_readiness_probe_starts_an_engine_left_to_first_use(engine: Engine) -> None:
    transport = httpx.ASGITransport(create_app(engine, metrics=False))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        assert (await http.get("/health")).status_code == 200
        assert engine.state == "new"
        assert (await http.get("/ready")).status_code == 503
        await engine.start()  # waits for the start that the probe began
        assert (await http.get("/ready")).status_code == 200


async def test_the_first_request_starts_the_engine(engine: Engine) -> None:
    transport = httpx.ASGITransport(create_app(engine, metrics=False))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        assert (await http.post(CHAT, json=chat(temperature="hot"))).status_code == 400
        assert engine.state == "new"
        reply = (await http.post(CHAT, json=chat())).json()
        assert (await http.get("/ready")).status_code == 200
        streamed = events((await http.post(CHAT, json=chat(stream=True))).text)
        too_long = await http.post(CHAT, json=chat(max_tokens=10_000_000))
        unknown_id = await http.post("/v1/completions", json=body(prompt=[5, 99_999]))
        empty = await http.post("/v1/completions", json=body(prompt=""))
    assert reply["usage"]["completion_tokens"] == 20
    assert reply["choices"][0]["finish_reason"] == "length"
    text = "".join(c["choices"][0]["delta"].get("content", "") for c in streamed[:-1])
    assert text == reply["choices"][0]["message"]["content"]
    assert too_long.json()["error"]["code"] == "context_length_exceeded"
    assert too_long.json()["error"]["param"] == "messages"
    assert unknown_id.json()["error"]["param"] == "prompt"
    assert empty.json()["error"]["param"] == "prompt"


async def test_a_stop_string_ends_the_request_at_its_token(engine: Engine) -> None:
    app = create_app(engine, metrics=False)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        whole = (await http.post("/v1/completions", json=body(prompt="hi", max_tokens=40))).json()
        text = whole["choices"][0]["text"]
        stop = text[10:12]
        cut = (
            await http.post("/v1/completions", json=body(prompt="hi", max_tokens=40, stop=stop))
        ).json()
    assert cut["choices"][0]["finish_reason"] == "stop"
    assert cut["choices"][0]["text"] == text[: text.index(stop)]
    assert cut["usage"]["completion_tokens"] < 40


async def test_after_a_stop_it_refuses_instead_of_reviving(engine: Engine) -> None:
    app = create_app(engine, metrics=False)
    await call(app, CHAT, chat())
    await engine.stop()
    start, _ = await call(app, CHAT, chat())
    assert start["status"] == 503
    assert engine.state == "stopped"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_frees_the_engine(
    engine: Engine, gate: StepGate, stream: bool
) -> None:
    transport = DisconnectingASGITransport(create_app(engine, metrics=False))
    payload = chat(max_tokens=None, stream=stream)
    with anyio.fail_after(20):
        async with (
            httpx.AsyncClient(transport=transport, base_url="http://test") as http,
            anyio.create_task_group() as group,
        ):
            gate.hold()
            group.start_soon(lambda: http.post(CHAT, json=payload))
            held = await gate.held()
            assert engine.load().num_running == 1
            group.cancel_scope.cancel()
        gate.open()
        await assert_idle_async(engine)
    assert gate.arrived == held
