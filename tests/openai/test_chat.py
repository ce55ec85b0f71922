"""Chat replies and chunks in OpenAI's shapes, checked by the `openai` client's own types."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from qwen3_asgi.openai.chat import ChatReply
from qwen3_asgi.openai.parsing import parse_request
from qwen3_asgi.openai.requests import ChatRequest
from tests.openai.batches import batches, body, content
from tests.text.toy import token, toy_tokenizer

if TYPE_CHECKING:
    from qwen3_asgi.engine.handle import TokenBatch

TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


def reply(prompt: str = "hi", **fields: Any) -> ChatReply:
    fields = body(messages=[{"role": "user", "content": prompt}]) | fields
    request = parse_request(json.dumps(fields).encode(), ChatRequest)
    ids = toy_tokenizer().encode_chat(
        request.messages, tools=request.offered_tools, enable_thinking=request.thinking
    )
    return ChatReply(request, toy_tokenizer(), ids)


def whole(script: list[TokenBatch], **fields: Any) -> ChatCompletion:
    made = reply(**fields)
    for batch in script:
        made.push(0, batch)
    return ChatCompletion.model_validate(made.body())


def streamed(script: list[TokenBatch], **fields: Any) -> list[dict[str, Any]]:
    made = reply(stream=True, **fields)
    chunks = [chunk for batch in script for chunk in made.stream(0, batch)]
    if fields.get("stream_options"):
        chunks.append(made.usage_chunk())
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk)
    return chunks


def deltas(chunks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [choice["delta"] for chunk in chunks for choice in chunk["choices"]]


def test_a_reply() -> None:
    end = token("<|im_end|>")
    made = whole(batches("hel", "lo", stop_token=end, cached_tokens=4))
    assert made.id.startswith("chatcmpl-")
    assert made.object == "chat.completion"
    assert made.model == "toy"
    [choice] = made.choices
    assert choice.index == 0
    assert choice.message.role == "assistant"
    assert choice.message.content == "hello"
    assert choice.message.tool_calls is None
    assert choice.logprobs is None
    assert choice.finish_reason == "stop"
    assert made.usage is not None
    assert made.usage.to_dict() == {
        "prompt_tokens": 21,
        "completion_tokens": 6,
        "total_tokens": 27,
        "prompt_tokens_details": {"cached_tokens": 4},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


def test_the_bytes_of_a_reply() -> None:
    made = reply()
    made.push(0, batches("hé")[0])
    payload = made.body()
    assert payload.pop("id").startswith("chatcmpl-")
    assert payload.pop("created") > 1_700_000_000
    assert payload == {
        "object": "chat.completion",
        "model": "toy",
        "system_fingerprint": None,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "hé", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {
            "prompt_tokens": payload["usage"]["prompt_tokens"],
            "completion_tokens": 3,
            "total_tokens": payload["usage"]["prompt_tokens"] + 3,
            "prompt_tokens_details": {"cached_tokens": 0},
            "completion_tokens_details": {"reasoning_tokens": 0},
        },
    }


def test_reasoning_has_both_names() -> None:
    script = batches("<think>\nwhy", "\n</think>\n\nso")
    message = whole(script).choices[0].message.to_dict()
    assert message["content"] == "so"
    assert message["reasoning"] == message["reasoning_content"] == "why"
    chunks = streamed(script)
    assert content(chunks) == "so"
    assert content(chunks, "reasoning") == content(chunks, "reasoning_content") == "why"
    usage = whole(script).usage
    assert usage is not None
    assert usage.completion_tokens_details is not None
    assert usage.completion_tokens_details.reasoning_tokens == 5


def test_length_is_a_finish_reason() -> None:
    assert whole(batches("a", reason="length")).choices[0].finish_reason == "length"


def test_a_tool_call() -> None:
    [choice] = whole(batches(CALL), tools=[TOOL]).choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    assert choice.message.tool_calls is not None
    [call] = choice.message.tool_calls
    assert call.type == "function"
    assert call.id.startswith("call_")
    assert call.function.name == "f"
    assert json.loads(call.function.arguments) == {"a": 1}


def test_tool_calls_stream_as_one_delta_each() -> None:
    chunks = streamed(batches("ok", "\n" + CALL + "\n", CALL), tools=[TOOL])
    calls = [call for delta in deltas(chunks) for call in delta.get("tool_calls", ())]
    assert [call["index"] for call in calls] == [0, 1]
    assert [call["function"]["name"] for call in calls] == ["f", "f"]
    assert calls[0]["id"] != calls[1]["id"]
    assert content(chunks) == "ok"
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_a_malformed_call_is_content() -> None:
    [choice] = whole(batches("<tool_call>{oops</tool_call>"), tools=[TOOL]).choices
    assert choice.message.content == "<tool_call>{oops</tool_call>"
    assert choice.finish_reason == "stop"


@pytest.mark.parametrize("fields", [{}, {"tools": [TOOL], "tool_choice": "none"}])
def test_without_tools_a_call_is_content(fields: dict[str, Any]) -> None:
    assert whole(batches(CALL), **fields).choices[0].message.content == CALL


def test_a_call_cut_off_by_the_limit_keeps_its_reason() -> None:
    [choice] = whole(batches(CALL, "x", reason="length"), tools=[TOOL]).choices
    assert choice.finish_reason == "length"
    assert choice.message.tool_calls is not None


def test_a_stop_string_is_cut_off() -> None:
    script = batches("abcE", "ND", stop_reason="END")
    assert whole(script, stop="END").choices[0].message.content == "abc"
    assert content(streamed(script, stop="END")) == "abc"


def test_a_stream_begins_with_the_role_and_ends_with_the_reason() -> None:
    chunks = streamed(batches("hel", "lo", stop_token=token("<|im_end|>")))
    assert deltas(chunks) == [
        {"role": "assistant", "content": ""},
        {"content": "hel"},
        {"content": "lo"},
        {},
    ]
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None, None, None, "stop"]
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert all("usage" not in chunk for chunk in chunks)


def test_an_empty_answer_streams_role_and_reason() -> None:
    chunks = streamed(batches("", stop_token=token("<|im_end|>")))
    assert deltas(chunks) == [{"role": "assistant", "content": ""}, {}]


def test_usage_comes_last_and_is_null_before() -> None:
    chunks = streamed(batches("a", "b"), stream_options={"include_usage": True})
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * 4
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 2


def test_usage_can_be_continuous() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = streamed(batches("a", "bc"), stream_options=options)
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 1, 3, 3, 3]


def test_logprobs() -> None:
    script = batches("a", "bé", stop_token=token("<|im_end|>"))
    logprobs = whole(script, logprobs=True, top_logprobs=1).choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [entry.token for entry in logprobs.content] == ["a", "b", "�", "�"]
    assert [entry.bytes for entry in logprobs.content] == [[97], [98], [0xC3], [0xA9]]
    assert [entry.logprob for entry in logprobs.content] == [-0.5] * 4
    assert [len(entry.top_logprobs) for entry in logprobs.content] == [1] * 4


def test_logprobs_stream_once_each_even_when_text_is_held_back() -> None:
    chunks = streamed(batches("a", "E", "x"), logprobs=True, stop="END")
    sent = [choice["logprobs"] for chunk in chunks for choice in chunk["choices"]]
    tokens = [[e["token"] for e in logprobs["content"]] if logprobs else [] for logprobs in sent]
    assert tokens == [[], ["a"], ["E", "x"], []]
    assert content(chunks) == "aEx"
