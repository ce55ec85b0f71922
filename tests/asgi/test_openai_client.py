"""The official client works against the app: replies, streams, and its exception classes."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import httpx
import openai
import pytest

from qwen3_asgi.app import create_app
from qwen3_asgi.errors import EngineNotReady, EngineOverloaded, GenerationFailed
from tests.asgi.scripted import ScriptedEngine
from tests.openai.batches import batches

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    """asyncio only: the client leaves async generators to the collector, of which trio warns."""
    return "asyncio"


MESSAGES: Any = [{"role": "user", "content": "hi"}]
TOOLS: Any = [{"type": "function", "function": {"name": "f", "parameters": {}}}]


@asynccontextmanager
async def official(
    engine: ScriptedEngine, *, api_key: str = "secret"
) -> AsyncIterator[openai.AsyncOpenAI]:
    app = create_app(engine, metrics=False, api_key="secret")
    # Which httpx the client's types name depends on its version; it takes either.
    http: Any = httpx.AsyncClient(transport=httpx.ASGITransport(app))
    async with (
        http,
        openai.AsyncOpenAI(
            base_url="http://test/v1", api_key=api_key, http_client=http, max_retries=0
        ) as client,
    ):
        yield client


async def test_chat_and_completion() -> None:
    async with official(ScriptedEngine()) as client:
        chat = await client.chat.completions.create(model="toy", messages=MESSAGES)
        completion = await client.completions.create(model="toy", prompt=["a", "b"])
        models = await client.models.list()
    assert chat.choices[0].message.content == "hello"
    assert [choice.text for choice in completion.choices] == ["hello", "hello"]
    assert [model.id for model in models.data] == ["toy"]


async def test_a_stream_with_a_tool_call() -> None:
    call = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    async with official(ScriptedEngine([batches("<think>hm</think>ok", call)])) as client:
        stream = await client.chat.completions.create(
            model="toy",
            messages=MESSAGES,
            tools=TOOLS,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
    deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
    assert "".join(delta.content or "" for delta in deltas) == "ok"
    [tool_call] = [c for delta in deltas for c in delta.tool_calls or ()]
    assert tool_call.function is not None
    assert tool_call.function.arguments == '{"a": 1}'
    assert chunks[-1].usage is not None


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (EngineOverloaded("full"), openai.RateLimitError),
        (EngineNotReady("starting"), openai.InternalServerError),
    ],
)
async def test_refusals_have_the_clients_classes(error: Exception, raised: type[Exception]) -> None:
    async with official(ScriptedEngine([error])) as client:
        with pytest.raises(raised):
            await client.chat.completions.create(model="toy", messages=MESSAGES)


async def test_wrong_requests_have_the_clients_classes() -> None:
    async with official(ScriptedEngine()) as client:
        with pytest.raises(openai.BadRequestError) as bad:
            await client.chat.completions.create(model="toy", messages=MESSAGES, n=0)
        with pytest.raises(openai.NotFoundError) as missing:
            await client.chat.completions.create(model="gpt-4", messages=MESSAGES)
    assert (bad.value.param, bad.value.code) == ("n", "invalid_value")
    assert missing.value.code == "model_not_found"
    async with official(ScriptedEngine(), api_key="wrong") as client:
        with pytest.raises(openai.AuthenticationError):
            await client.models.list()


async def test_a_failure_in_a_stream_reaches_the_client() -> None:
    engine = ScriptedEngine([[batches("a", "b")[0], GenerationFailed("NaN logits")]])
    async with official(engine) as client:
        stream = await client.chat.completions.create(model="toy", messages=MESSAGES, stream=True)
        with pytest.raises(openai.APIError, match="NaN logits"):
            async for _ in stream:
                pass
