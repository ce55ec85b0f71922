"""The openai package's own client talks to the served app: every call a user would make."""

from __future__ import annotations

import openai
import pytest

MODEL = "tiny"
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
PLAIN = {"chat_template_kwargs": {"enable_thinking": False}}


@pytest.fixture
def client(tiny_server):
    with openai.OpenAI(base_url=f"{tiny_server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def make_async_client(tiny_server):
    def make():
        return openai.AsyncOpenAI(base_url=f"{tiny_server.url}/v1", api_key="none", max_retries=0)

    return make


def test_models_are_listed_and_found(client):
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).object == "model"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("other")
    assert caught.value.code == "model_not_found"


def test_a_chat_is_answered_rightly(client):
    answer = client.chat.completions.create(
        model=MODEL, messages=QUESTION, temperature=0, extra_body=PLAIN
    )
    choice = answer.choices[0]
    assert "Paris" in choice.message.content
    assert choice.finish_reason == "stop"
    usage = answer.usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


def test_a_streamed_chat_adds_up_to_the_whole_one(client):
    whole = client.chat.completions.create(
        model=MODEL, messages=QUESTION, temperature=0, extra_body=PLAIN
    )
    chunks = list(
        client.chat.completions.create(
            model=MODEL,
            messages=QUESTION,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body=PLAIN,
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_thinking_is_told_apart_from_the_answer(client):
    message = (
        client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0)
        .choices[0]
        .message
    )
    assert message.reasoning_content
    assert "<think>" not in message.content
    assert "Paris" in message.content


def test_a_tool_call_comes_as_a_tool_call(client):
    tool = {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Get the current weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
            },
        },
    }
    choice = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "What is the weather in Paris?"}],
        tools=[tool],
        temperature=0,
        extra_body=PLAIN,
    ).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls[0].function.name == "get_weather"
    assert "Paris" in choice.message.tool_calls[0].function.arguments


def test_completions_with_logprobs_stop_and_seed(client):
    first, second = (
        client.completions.create(
            model=MODEL,
            prompt="The capital of France is",
            max_tokens=12,
            temperature=0.8,
            seed=7,
            logprobs=3,
        )
        for _ in range(2)
    )
    assert first.choices[0].text == second.choices[0].text
    # The token that ends the text is counted, but has no text to have a logprob beside.
    ended = first.choices[0].finish_reason == "stop"
    assert len(first.choices[0].logprobs.tokens) == first.usage.completion_tokens - ended
    stopped = client.completions.create(
        model=MODEL, prompt="Count: 1, 2, 3,", max_tokens=40, temperature=0, stop=["6"]
    )
    assert "6" not in stopped.choices[0].text
    assert stopped.choices[0].finish_reason == "stop"


def test_streamed_completions(client):
    parts = list(
        client.completions.create(
            model=MODEL, prompt=["1, 2, 3,", "One, two,"], max_tokens=8, temperature=0, stream=True
        )
    )
    assert {choice.index for part in parts for choice in part.choices} == {0, 1}


def test_three_choices_of_one_prompt(client):
    def ask(n, **arguments):
        return client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Tell me something."}],
            n=n,
            temperature=2,
            top_p=1,
            seed=11,
            max_tokens=24,
            extra_body={**PLAIN, "top_k": 0},
            **arguments,
        )

    three, one = ask(3), ask(1)
    said = [choice.message.content for choice in three.choices]
    assert [choice.index for choice in three.choices] == [0, 1, 2]
    assert len(set(said)) == 3
    assert said[0] == one.choices[0].message.content
    assert three.usage.prompt_tokens == one.usage.prompt_tokens
    assert three.usage.completion_tokens > one.usage.completion_tokens
    streamed = ["", "", ""]
    for chunk in ask(3, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == said


def test_a_deadline_ends_a_request(client, tiny_server):
    with pytest.raises(openai.InternalServerError) as caught:
        client.completions.create(
            model=MODEL, prompt="1, 2, 3,", max_tokens=2000, extra_body={"timeout": 1e-9}
        )
    assert (caught.value.status_code, caught.value.code) == (504, "generation_timeout")
    assert tiny_server.wait_idle()["kv_used_blocks"] == 0


@pytest.mark.parametrize(
    ("arguments", "error", "param"),
    [
        ({"temperature": -1}, openai.BadRequestError, "temperature"),
        ({"n": 17}, openai.BadRequestError, "n"),
        ({"max_tokens": 10**6}, openai.BadRequestError, "messages"),
        ({"model": "other"}, openai.NotFoundError, "model"),
        ({"presence_penalty": 0.5}, openai.BadRequestError, "presence_penalty"),
        ({"extra_body": {"no_such_field": 1}}, openai.BadRequestError, "no_such_field"),
    ],
)
def test_errors_are_typed_and_name_the_field(client, arguments, error, param):
    with pytest.raises(error) as caught:
        client.chat.completions.create(**{"model": MODEL, "messages": QUESTION, **arguments})
    assert caught.value.param == param
    assert isinstance(caught.value.code, str)


@pytest.mark.anyio
async def test_the_async_client_chats_streams_and_hangs_up(
    make_async_client, tiny_server, anyio_backend_name
):
    if anyio_backend_name == "trio":
        pytest.skip("the openai client needs an asyncio-only transport for keep-alive connections")
    async with make_async_client() as client:
        answer = await client.chat.completions.create(
            model=MODEL, messages=QUESTION, temperature=0, extra_body=PLAIN
        )
        assert "Paris" in answer.choices[0].message.content
        stream = await client.completions.create(
            model=MODEL,
            prompt="1, 2, 3,",
            max_tokens=2000,
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        async for _ in stream:
            break
        await stream.close()
    load = tiny_server.wait_idle()
    assert load["kv_used_blocks"] == 0
