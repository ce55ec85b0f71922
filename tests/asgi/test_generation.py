"""The two generation routes from request bytes to response bytes."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import anyio
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from qwen3_asgi.app import create_app
from qwen3_asgi.config import SamplingParams
from qwen3_asgi.errors import (
    ContextLengthExceeded,
    EngineDead,
    EngineNotReady,
    EngineOverloaded,
    GenerationCancelled,
    GenerationFailed,
    GenerationTimeout,
    InvalidRequest,
    ModelLoadError,
)
from tests.asgi.scripted import ScriptedEngine, call, client, events
from tests.openai.batches import batches, body, content
from tests.text.toy import token

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
MESSAGES = [{"role": "user", "content": "hi"}]


def chat(**fields: Any) -> dict[str, Any]:
    return body(messages=MESSAGES) | fields


def completion(**fields: Any) -> dict[str, Any]:
    return body(prompt="hi") | fields


async def test_chat() -> None:
    engine = ScriptedEngine()
    async with client(engine) as http:
        response = await http.post(CHAT, json=chat(temperature=0, cache_salt="s"))
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/json"
    made = ChatCompletion.model_validate(response.json())
    assert made.choices[0].message.content == "hello"
    assert engine.submitted == [
        {
            "messages": MESSAGES,
            "tools": None,
            "enable_thinking": True,
            "params": SamplingParams(temperature=0.0),
            "cache_salt": "s",
            "adapter": None,
            "timeout": None,
            "priority": 0,
        }
    ]
    assert engine.handles[0].cancelled


async def test_a_chat_stream() -> None:
    engine = ScriptedEngine([batches("hel", "lo", stop_token=token("<|im_end|>"))])
    async with client(engine) as http:
        response = await http.post(
            CHAT, json=chat(stream=True, stream_options={"include_usage": True})
        )
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    *chunks, done = events(response.text)
    assert done == "[DONE]"
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk)
    assert content(chunks) == "hello"
    assert chunks[-1]["usage"]["completion_tokens"] == 6
    assert engine.handles[0].cancelled


async def test_the_bytes_of_a_chat_stream() -> None:
    engine = ScriptedEngine([batches("hé", "llo")])
    start, *bodies = await call(create_app(engine, metrics=False), CHAT, chat(stream=True))
    assert start["status"] == 200
    chunk_id = json.loads(bodies[0]["body"].split(b"\n\n")[0][6:])
    head = (
        f'data: {{"id":"{chunk_id["id"]}","object":"chat.completion.chunk",'
        f'"created":{chunk_id["created"]},"model":"toy","system_fingerprint":null,'
        '"choices":[{"index":0,"delta":'
    )
    tail = ',"logprobs":null,"finish_reason":null}]}\n\n'
    assert bodies == [
        {
            "type": "http.response.body",
            "body": f'{head}{{"role":"assistant","content":""}}{tail}'
            f'{head}{{"content":"hé"}}{tail}'.encode(),
            "more_body": True,
        },
        {
            "type": "http.response.body",
            "body": f'{head}{{"content":"llo"}}{tail}'
            f'{head}{{}},"logprobs":null,"finish_reason":"stop"}}]}}\n\n'.encode(),
            "more_body": True,
        },
        {"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False},
    ]


async def test_a_completion() -> None:
    engine = ScriptedEngine()
    async with client(engine) as http:
        response = await http.post(COMPLETIONS, json=completion())
    made = Completion.model_validate(response.json())
    assert made.choices[0].text == "hello"
    assert engine.submitted[0]["prompt"] == "hi"
    assert engine.submitted[0]["params"].max_tokens == 16


async def test_several_prompts_run_at_the_same_time() -> None:
    reading = 0
    all_read = anyio.Event()

    async def meet() -> None:
        nonlocal reading
        reading += 1
        if reading == 4:
            all_read.set()
        await all_read.wait()

    engine = ScriptedEngine([[meet, *batches(text)] for text in "abcd"])
    async with client(engine) as http:
        with anyio.fail_after(10):
            response = await http.post(COMPLETIONS, json=completion(prompt=[[1], [2], [3], [4]]))
    assert [choice["text"] for choice in response.json()["choices"]] == list("abcd")
    assert [asked["prompt_token_ids"] for asked in engine.submitted] == [[1], [2], [3], [4]]


async def test_several_prompts_stream_interleaved() -> None:
    turns = [anyio.Event() for _ in range(3)]

    async def signal(turn: int) -> None:
        turns[turn].set()

    first, second = batches("a", "b"), batches("c", "d")
    engine = ScriptedEngine(
        [
            [first[0], partial(signal, 0), turns[1].wait, first[1], partial(signal, 2)],
            [turns[0].wait, second[0], partial(signal, 1), turns[2].wait, second[1]],
        ]
    )
    async with client(engine) as http:
        with anyio.fail_after(10):
            response = await http.post(COMPLETIONS, json=completion(prompt=["x", "y"], stream=True))
    *chunks, done = events(response.text)
    assert done == "[DONE]"
    texts = [(c["choices"][0]["index"], c["choices"][0]["text"]) for c in chunks]
    assert [text for text in texts if text[1]] == [(0, "a"), (1, "c"), (0, "b"), (1, "d")]
    assert all(handle.cancelled for handle in engine.handles)


async def test_a_refused_prompt_cancels_those_before_it() -> None:
    engine = ScriptedEngine([batches("a"), EngineOverloaded("full", retry_after=2.5)])
    async with client(engine) as http:
        response = await http.post(COMPLETIONS, json=completion(prompt=["x", "y"], stream=True))
    assert response.status_code == 429
    assert response.headers["retry-after"] == "3"
    assert engine.handles[0].cancelled


async def test_a_large_body_is_parsed_on_a_thread() -> None:
    engine = ScriptedEngine()
    async with client(engine) as http:
        await http.post(COMPLETIONS, json=completion())
        assert engine.offloaded == []
        response = await http.post(COMPLETIONS, json=completion(prompt="x" * 100_000))
    assert response.status_code == 200
    assert engine.offloaded == ["parse_request"]


ERRORS = [
    (InvalidRequest("no", param="top_k"), 400, "invalid_request_error", "invalid_value", "top_k"),
    (
        ContextLengthExceeded("long"),
        400,
        "invalid_request_error",
        "context_length_exceeded",
        "messages",
    ),
    (EngineOverloaded("full"), 429, "rate_limit_error", "engine_overloaded", None),
    (EngineNotReady("starting"), 503, "server_error", "engine_not_ready", None),
    (EngineDead("dead"), 503, "server_error", "engine_dead", None),
    (GenerationCancelled("stopped"), 503, "server_error", "generation_cancelled", None),
    (GenerationFailed("NaN"), 500, "server_error", "generation_failed", None),
    (GenerationTimeout("late"), 504, "timeout_error", "generation_timeout", None),
    (ModelLoadError("/secret/path"), 500, "server_error", "internal_error", None),
    (RuntimeError("secret"), 500, "server_error", "internal_error", None),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("error", "status", "kind", "code", "param"), ERRORS)
async def test_a_refused_submission_has_its_status(
    error: Exception, status: int, kind: str, code: str, param: str | None, stream: bool
) -> None:
    async with client(ScriptedEngine([error])) as http:
        response = await http.post(CHAT, json=chat(stream=stream))
    assert response.status_code == status
    assert response.headers["content-type"] == "application/json"
    assert ("retry-after" in response.headers) == (status in (429, 503))
    [(name, shown)] = response.json().items()
    assert name == "error"
    assert "secret" not in shown.pop("message")
    assert shown == {"type": kind, "code": code, "param": param}


@pytest.mark.parametrize("error", [GenerationFailed("NaN logits"), EngineDead("dead")])
@pytest.mark.parametrize("route", [(CHAT, chat()), (COMPLETIONS, completion(prompt=["a", "b"]))])
async def test_a_failure_while_reading_has_its_status(
    error: Exception, route: tuple[str, dict[str, Any]]
) -> None:
    engine = ScriptedEngine([[batches("a", "b")[0], error]])
    async with client(engine) as http:
        response = await http.post(route[0], json=route[1])
    assert response.status_code in (500, 503)
    assert response.json()["error"]["message"] == str(error)
    assert all(handle.cancelled for handle in engine.handles)


@pytest.mark.parametrize("route", [(CHAT, chat()), (COMPLETIONS, completion(prompt=["a", "b"]))])
async def test_a_failure_in_a_stream_is_its_last_event(
    route: tuple[str, dict[str, Any]],
) -> None:
    engine = ScriptedEngine([[batches("a", "b")[0], GenerationFailed("NaN logits")]])
    async with client(engine) as http:
        response = await http.post(route[0], json=route[1] | {"stream": True})
    assert response.status_code == 200
    payloads = events(response.text)
    assert payloads[-1] == {
        "error": {
            "message": "NaN logits",
            "type": "server_error",
            "param": None,
            "code": "generation_failed",
        }
    }
    assert "[DONE]" not in payloads
    assert all(handle.cancelled for handle in engine.handles)


async def test_a_bug_in_a_stream_shows_as_an_error_and_is_raised_to_the_server() -> None:
    engine = ScriptedEngine([[batches("a", "b")[0], RuntimeError("secret")]])
    async with client(engine) as http:
        response = await http.post(CHAT, json=chat(stream=True))
    assert events(response.text)[-1]["error"]["code"] == "internal_error"
    assert "secret" not in response.text
    with pytest.raises(RuntimeError, match="secret"):
        await call(create_app(engine, metrics=False), CHAT, chat(stream=True))


@pytest.mark.parametrize(
    ("path", "payload", "status", "param", "code"),
    [
        (CHAT, chat(temperature="hot"), 400, "temperature", "invalid_type"),
        (CHAT, chat(model="gpt-4"), 404, "model", "model_not_found"),
        (CHAT, {"messages": MESSAGES}, 400, "model", "missing_required_parameter"),
        (CHAT, chat(n=0), 400, "n", "invalid_value"),
        (CHAT, chat(messages=[]), 400, "messages", "invalid_value"),
        (CHAT, chat(messages=[{"role": "x"}]), 400, "messages[0].role", "invalid_value"),
        (COMPLETIONS, completion(prompt=""), 400, "prompt", "invalid_value"),
        (COMPLETIONS, completion(prompt=[[]]), 400, "prompt", "invalid_value"),
        (COMPLETIONS, completion(max_tokens=0), 400, "max_tokens", "invalid_value"),
    ],
)
async def test_a_wrong_request_names_its_field(
    path: str, payload: dict[str, Any], status: int, param: str, code: str
) -> None:
    async with client(ScriptedEngine()) as http:
        response = await http.post(path, json=payload)
    assert response.status_code == status
    error = response.json()["error"]
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", param, code)


async def test_the_wire_has_one_name_for_a_prompt() -> None:
    engine = ScriptedEngine([InvalidRequest("no", param="prompt_token_ids")])
    async with client(engine) as http:
        response = await http.post(COMPLETIONS, json=completion(prompt=[1]))
    assert response.json()["error"]["param"] == "prompt"


async def test_a_body_over_the_limit_is_refused() -> None:
    async with client(ScriptedEngine(), max_body_bytes=100) as http:
        response = await http.post(CHAT, content=b"x" * 101)
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "request_too_large"


async def test_a_body_over_the_limit_is_refused_without_a_length_header() -> None:
    app = create_app(ScriptedEngine(), metrics=False, max_body_bytes=100)
    start, reply = await call(app, CHAT, body=[b"x" * 60, b"x" * 60, b"x" * 60])
    assert start["status"] == 413
    assert json.loads(reply["body"])["error"]["code"] == "request_too_large"


async def test_a_body_in_parts_is_put_together() -> None:
    data = json.dumps(chat()).encode()
    app = create_app(ScriptedEngine(), metrics=False)
    start, _ = await call(app, CHAT, body=[data[:10], b"", data[10:]])
    assert start["status"] == 200


async def test_the_thinking_prompt_decides_where_the_output_starts() -> None:
    engine = ScriptedEngine([batches("<think>a</think>b")])
    async with client(engine) as http:
        response = await http.post(CHAT, json=chat(enable_thinking=False))
    assert response.json()["choices"][0]["message"]["content"] == "b"
    assert engine.submitted[0]["enable_thinking"] is False


async def test_a_silent_stream_is_kept_alive() -> None:
    engine = ScriptedEngine([[0.3, *batches("a")]])
    async with client(engine, keep_alive_seconds=0.05) as http:
        response = await http.post(CHAT, json=chat(stream=True))
    assert response.text.startswith(": keep-alive\n\n")
    assert events(response.text)[-1] == "[DONE]"
