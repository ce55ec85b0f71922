"""Completion replies and chunks in OpenAI's shape, checked by the `openai` client's own type."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from openai.types import Completion

from qwen3_asgi.openai.completions import CompletionReply
from qwen3_asgi.openai.parsing import parse_request
from qwen3_asgi.openai.requests import CompletionRequest
from qwen3_asgi.scheduler.plan import SampledToken
from tests.openai.batches import batches, body
from tests.text.toy import token, toy_tokenizer

if TYPE_CHECKING:
    from qwen3_asgi.engine.handle import TokenBatch


def reply(**fields: Any) -> CompletionReply:
    request = parse_request(json.dumps(body(prompt="hello") | fields).encode(), CompletionRequest)
    ids = [p if isinstance(p, list) else toy_tokenizer().encode(p) for p in request.prompts]
    return CompletionReply(request, toy_tokenizer(), request.prompts, ids)


def whole(*scripts: list[TokenBatch], **fields: Any) -> Completion:
    made = reply(**fields)
    for i, script in enumerate(scripts):
        for batch in script:
            made.push(i, batch)
    return Completion.model_validate(made.body())


def test_a_reply() -> None:
    made = whole(batches("wor", "ld", stop_token=token("<|endoftext|>"), cached_tokens=2))
    assert made.id.startswith("cmpl-")
    assert made.object == "text_completion"
    [choice] = made.choices
    assert (choice.index, choice.text, choice.finish_reason) == (0, "world", "stop")
    assert choice.logprobs is None
    assert made.usage is not None
    assert made.usage.to_dict() == {
        "prompt_tokens": 1,
        "completion_tokens": 6,
        "total_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 2},
    }


def test_one_choice_per_prompt_and_one_usage() -> None:
    made = whole(batches("A"), batches("BB", reason="length"), prompt=["a", "b"])
    assert [(c.index, c.text, c.finish_reason) for c in made.choices] == [
        (0, "A", "stop"),
        (1, "BB", "length"),
    ]
    assert made.usage is not None
    assert (made.usage.prompt_tokens, made.usage.completion_tokens) == (2, 3)


def test_tags_are_text_here() -> None:
    text = "<think>a</think><tool_call>b</tool_call>\n"
    assert whole(batches(text)).choices[0].text == text


def test_echo() -> None:
    assert whole(batches("X"), echo=True).choices[0].text == "helloX"
    ids = [token("<|im_start|>"), *toy_tokenizer().encode("hello")]
    assert whole(batches("X"), echo=True, prompt=ids).choices[0].text == "<|im_start|>helloX"


def test_chunks_of_several_choices() -> None:
    made = reply(prompt=["a", "b"], echo=True, stream=True)
    first, second = batches("1", "2"), batches("3", reason="length")
    chunks = [
        *made.stream(0, first[0]),
        *made.stream(1, second[0]),
        *made.stream(0, first[1]),
    ]
    for chunk in chunks:
        # The client's type has no null reason, which OpenAI's own streams send all the same.
        Completion.model_construct(**chunk)
    flat = [chunk["choices"][0] for chunk in chunks]
    assert [(c["index"], c["text"], c["finish_reason"]) for c in flat] == [
        (0, "a1", None),
        (1, "b3", None),
        (1, "", "length"),
        (0, "2", None),
        (0, "", "stop"),
    ]
    assert made.usage_chunk()["choices"] == []
    assert made.usage_chunk()["usage"]["completion_tokens"] == 3


def test_usage_is_null_until_the_end() -> None:
    made = reply(stream=True, stream_options={"include_usage": True})
    assert [chunk["usage"] for chunk in made.stream(0, batches("a")[0])] == [None, None]


def test_logprobs() -> None:
    [choice] = whole(batches("a", "é", "b"), logprobs=1).choices
    logprobs = choice.logprobs
    assert logprobs is not None
    assert logprobs.tokens == ["a", "bytes:\\xc3", "bytes:\\xa9", "b"]
    assert logprobs.token_logprobs == [-0.5] * 4
    assert logprobs.text_offset == [0, 1, 1, 2]
    assert logprobs.top_logprobs == [{name: -0.5} for name in logprobs.tokens]


def test_logprobs_zero_reports_the_chosen_only() -> None:
    [choice] = whole(batches("a"), logprobs=0).choices
    assert choice.logprobs is not None
    assert choice.logprobs.top_logprobs is None
    assert choice.logprobs.token_logprobs == [-0.5]


def test_logprobs_without_a_number_are_very_unlikely() -> None:
    [batch] = batches("a")
    tokens = (SampledToken(batch.tokens[0].token_id, float("-inf")),)
    [choice] = whole([batch._replace(tokens=tokens)], logprobs=0).choices
    assert choice.logprobs is not None
    assert choice.logprobs.token_logprobs == [-9999.0]


def test_streamed_logprobs_go_on_where_they_were() -> None:
    made = reply(stream=True, logprobs=0)
    chunks = [chunk for batch in batches("ab", "c") for chunk in made.stream(0, batch)]
    offsets = [c["choices"][0]["logprobs"]["text_offset"] for c in chunks[:2]]
    assert offsets == [[0, 1], [2]]
    assert chunks[2]["choices"][0]["logprobs"] is None
