"""`n` choices over HTTP: bodies, streams, usage, and a client that leaves."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import anyio
import httpx
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from qwen3_asgi.app import create_app
from qwen3_asgi.config import EngineConfig
from qwen3_asgi.testing import (
    DisconnectingASGITransport,
    FakeExecutor,
    StepGate,
    assert_idle_async,
    fake_engine,
)
from tests.asgi.scripted import ScriptedEngine, client, events
from tests.openai.batches import batches, body
from tests.text.toy import toy_tokenizer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from qwen3_asgi.engine.engine import Engine
    from qwen3_asgi.engine.handle import TokenBatch

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


def chat(**fields: Any) -> dict[str, Any]:
    return body(messages=[{"role": "user", "content": "hi"}]) | fields


def mixed(*scripts: list[TokenBatch]) -> list[TokenBatch]:
    """What a handle yields for several outputs: their batches in turn."""
    numbered = [[b._replace(choice=i) for b in script] for i, script in enumerate(scripts)]
    longest = max(map(len, numbered))
    return [script[k] for k in range(longest) for script in numbered if k < len(script)]


async def test_a_chat_with_three_choices() -> None:
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    script = mixed(
        batches("<think>hm</think>", "one", prompt_tokens=5, cached_tokens=2),
        batches("two", reason="length", prompt_tokens=5, cached_tokens=4),
        batches(call, prompt_tokens=5, cached_tokens=4),
    )
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    engine = ScriptedEngine([script])
    async with client(engine) as http:
        response = await http.post(CHAT, json=chat(n=3, tools=tools))
    made = ChatCompletion.model_validate(response.json())
    assert [choice.index for choice in made.choices] == [0, 1, 2]
    assert [choice.message.content for choice in made.choices] == ["one", "two", None]
    assert [choice.finish_reason for choice in made.choices] == ["stop", "length", "tool_calls"]
    assert [bool(choice.message.tool_calls) for choice in made.choices] == [False, False, True]
    assert response.json()["choices"][0]["message"]["reasoning"] == "hm"
    assert "reasoning" not in response.json()["choices"][1]["message"]
    assert made.usage is not None
    # The prompt is counted once, and so is what the cache had of it.
    assert made.usage.prompt_tokens == len(engine.handles[0].prompt_token_ids)
    assert made.usage.completion_tokens == sum(len(batch.tokens) for batch in script)
    assert made.usage.prompt_tokens_details is not None
    assert made.usage.prompt_tokens_details.cached_tokens == 2
    assert engine.submitted[0]["params"].n == 3


async def test_a_chat_stream_with_two_choices() -> None:
    script = mixed(batches("a", "b", "c"), batches("x", "y", reason="length"))
    async with client(ScriptedEngine([script])) as http:
        response = await http.post(
            CHAT, json=chat(n=2, stream=True, stream_options={"include_usage": True})
        )
    *chunks, usage, done = events(response.text)
    assert done == "[DONE]"
    assert usage["usage"]["completion_tokens"] == 5
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk)
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    for index, text, reason in ((0, "abc", "stop"), (1, "xy", "length")):
        mine = [choice for choice in choices if choice["index"] == index]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(choice["delta"].get("content", "") for choice in mine) == text
        assert [c["finish_reason"] for c in mine if c["finish_reason"]] == [reason]
        assert mine[-1]["finish_reason"] == reason


@pytest.mark.parametrize("stream", [False, True])
async def test_the_choices_of_a_prompt_stand_together(stream: bool) -> None:
    engine = ScriptedEngine(
        [mixed(batches("a"), batches("b", "B")), mixed(batches("c", "C"), batches("d"))]
    )
    payload = body(prompt=["x", "y"], n=2, stream=stream, echo=True)
    async with client(engine) as http:
        response = await http.post(COMPLETIONS, json=payload)
    whole = ["xa", "xbB", "ycC", "yd"]
    if stream:
        texts = dict.fromkeys(range(4), "")
        for chunk in events(response.text)[:-1]:
            [choice] = chunk["choices"]
            texts[choice["index"]] += choice["text"]
        assert list(texts.values()) == whole
        return
    made = Completion.model_validate(response.json())
    assert [(choice.index, choice.text) for choice in made.choices] == list(enumerate(whole))
    assert made.usage is not None
    assert made.usage.prompt_tokens == 2  # one for each prompt


@pytest.fixture
def gate() -> StepGate:
    return StepGate()


@pytest.fixture
def executor(gate: StepGate) -> FakeExecutor:
    return FakeExecutor(num_kv_blocks=256, block_size=16, vocab_size=256, gate=gate)


@pytest.fixture
async def engine(executor: FakeExecutor) -> AsyncIterator[Engine]:
    config = EngineConfig(served_model_name="toy", max_n=4)
    engine = fake_engine(executor, config, tokenizer=toy_tokenizer(), eos_token_ids=())
    try:
        yield engine
    finally:
        await engine.stop(drain=5)


async def test_more_than_the_engine_makes_is_refused_by_name(engine: Engine) -> None:
    transport = httpx.ASGITransport(create_app(engine, metrics=False))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        for path, payload in ((CHAT, chat(n=5)), (COMPLETIONS, body(prompt="x", n=5))):
            response = await http.post(path, json=payload | {"stream": True})
            assert response.status_code == 400
            error = response.json()["error"]
            assert (error["param"], error["code"]) == ("n", "invalid_value")
            assert "at most 4" in error["message"]
        four = await http.post(CHAT, json=chat(n=4, max_tokens=3))
    assert len(four.json()["choices"]) == 4


async def test_the_prompt_of_a_chat_is_computed_and_counted_once(
    engine: Engine, executor: FakeExecutor
) -> None:
    transport = httpx.ASGITransport(create_app(engine, metrics=False))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        reply = (await http.post(CHAT, json=chat(n=4, max_tokens=8))).json()
    prefilled = sum(len(row.token_ids) for row in executor.rows if row.kind == "prefill")
    assert reply["usage"]["prompt_tokens"] == prefilled - 3  # each fork forwards the last token
    assert reply["usage"]["completion_tokens"] == 4 * 8
    texts = [choice["message"]["content"] for choice in reply["choices"]]
    assert all(one == other for one, other in pairwise(texts))  # greedy


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_ends_all_choices(
    engine: Engine, executor: FakeExecutor, gate: StepGate, stream: bool, path: str
) -> None:
    transport = DisconnectingASGITransport(create_app(engine, metrics=False))
    payload = chat(n=3) if path == CHAT else body(prompt=["x", "y"], n=3, max_tokens=3000)
    running = 3 if path == CHAT else 6
    with anyio.fail_after(20):
        async with (
            httpx.AsyncClient(transport=transport, base_url="http://test") as http,
            anyio.create_task_group() as group,
        ):
            await engine.start()
            gate.hold()
            group.start_soon(lambda: http.post(path, json=payload | {"stream": stream}))
            await gate.held()
            while engine.live_requests < running:
                await anyio.lowlevel.checkpoint()
            gate.allow(4)
            held = await gate.held(5)
            while engine.load().num_running < running:
                await anyio.lowlevel.checkpoint()
            group.cancel_scope.cancel()
        gate.open()
        await assert_idle_async(engine)
    assert gate.arrived == held
    assert len(executor.dropped) == running
