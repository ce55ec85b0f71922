"""Every request field is acted on, harmless, neutral, or refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from qwen3_asgi.config import SamplingParams
from qwen3_asgi.errors import InvalidRequest
from qwen3_asgi.openai.fields import HARMLESS, NEUTRAL
from qwen3_asgi.openai.parsing import parse_request
from qwen3_asgi.openai.requests import (
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    choose_adapter,
)
from tests.openai.batches import body

MESSAGES = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}


def chat(**fields: Any) -> ChatRequest:
    return parse_request(json.dumps(body(messages=MESSAGES) | fields).encode(), ChatRequest)


def completion(**fields: Any) -> CompletionRequest:
    return parse_request(json.dumps(body(prompt="hi") | fields).encode(), CompletionRequest)


def used(request: ChatRequest | CompletionRequest) -> None:
    """Read everything a route reads."""
    request.sampling()
    if isinstance(request, ChatRequest):
        _ = request.thinking, request.offered_tools
    else:
        _ = request.prompts


def refusal(make: Any, **fields: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as refused:
        used(make(**fields))
    return refused.value


@pytest.mark.parametrize("make", [chat, completion])
def test_sampling_fields_reach_the_engine(make: Any) -> None:
    request = make(
        temperature=1,
        top_p=0.9,
        top_k=7,
        min_p=0.1,
        seed=3,
        stop=["a", "b"],
        stop_token_ids=[1, 2],
        min_tokens=2,
        ignore_eos=True,
        max_tokens=9,
    )
    assert request.sampling() == SamplingParams(
        temperature=1.0,
        top_p=0.9,
        top_k=7,
        min_p=0.1,
        seed=3,
        stop=("a", "b"),
        stop_token_ids=(1, 2),
        min_tokens=2,
        ignore_eos=True,
        max_tokens=9,
    )


@pytest.mark.parametrize("make", [chat, completion])
def test_null_means_not_set(make: Any) -> None:
    names = [name for name in GenerationRequest.model_fields if name != "model"]
    request = make(**dict.fromkeys([*names, "max_tokens", "logprobs", *NEUTRAL, "whatever"]))
    used(request)
    assert request.sampling() == SamplingParams()


def test_defaults_of_the_two_routes() -> None:
    assert chat().sampling() == SamplingParams()
    assert completion().sampling() == SamplingParams(max_tokens=16)


def test_one_stop_string_is_a_list_of_one() -> None:
    assert chat(stop="x").sampling().stop == ("x",)


def test_the_smaller_of_both_limits_holds() -> None:
    assert chat(max_tokens=5, max_completion_tokens=3).sampling().max_tokens == 3
    assert chat(max_tokens=2, max_completion_tokens=3).sampling().max_tokens == 2
    assert chat(max_completion_tokens=3).sampling().max_tokens == 3


def test_logprobs_of_the_two_routes() -> None:
    assert chat(logprobs=True).sampling().logprobs == 0
    assert chat(logprobs=True, top_logprobs=3).sampling().logprobs == 3
    assert chat(logprobs=False).sampling().logprobs is None
    assert chat(logprobs=False, top_logprobs=0).sampling().logprobs is None
    assert completion(logprobs=2).sampling().logprobs == 2


@pytest.mark.parametrize(
    ("fields", "thinking"),
    [
        ({}, True),
        ({"enable_thinking": True}, True),
        ({"enable_thinking": False}, False),
        ({"chat_template_kwargs": {}}, True),
        ({"chat_template_kwargs": {"enable_thinking": False}}, False),
        ({"chat_template_kwargs": {"enable_thinking": False}, "enable_thinking": False}, False),
    ],
)
def test_thinking(fields: dict[str, Any], thinking: bool) -> None:
    assert chat(**fields).thinking is thinking


def test_tools_are_offered_unless_the_choice_is_none() -> None:
    assert chat(tools=[TOOL]).offered_tools == [TOOL]
    assert chat(tools=[TOOL], tool_choice="auto").offered_tools == [TOOL]
    assert chat(tools=[TOOL], tool_choice="none").offered_tools is None
    assert chat(tools=[]).offered_tools is None


@pytest.mark.parametrize("make", [chat, completion])
@pytest.mark.parametrize("field", sorted(HARMLESS))
def test_harmless_fields_are_accepted(make: Any, field: str) -> None:
    used(make(**{field: {"any": "thing"}}))


@pytest.mark.parametrize("make", [chat, completion])
@pytest.mark.parametrize(("field", "value"), [(f, v) for f, vs in NEUTRAL.items() for v in vs])
def test_neutral_values_are_accepted(make: Any, field: str, value: Any) -> None:
    used(make(**{field: value}))


@pytest.mark.parametrize("field", [f for f in NEUTRAL if f != "echo"])
@pytest.mark.parametrize("value", ["something", 3, {"type": "json_object"}])
@pytest.mark.parametrize("make", [chat, completion])
def test_other_values_of_neutral_fields_are_refused(make: Any, field: str, value: Any) -> None:
    refused = refusal(make, **{field: value})
    assert (refused.param, refused.code) == (field, "unsupported_parameter")


@pytest.mark.parametrize(
    ("field", "value"), [("n", True), ("store", 0), ("best_of", 2), ("skip_special_tokens", 1)]
)
def test_json_types_are_told_apart(field: str, value: Any) -> None:
    assert refusal(chat, **{field: value}).param == field


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"temperature": "hot"}, "temperature", "invalid_type"),
        ({"temperature": "0.5"}, "temperature", "invalid_type"),
        ({"temperature": 2.1}, "temperature", "invalid_value"),
        ({"top_p": 0}, "top_p", "invalid_value"),
        ({"top_k": 1.5}, "top_k", "invalid_type"),
        ({"min_p": 2}, "min_p", "invalid_value"),
        ({"seed": 2**70}, "seed", "invalid_value"),
        ({"max_tokens": 0}, "max_tokens", "invalid_value"),
        ({"max_tokens": True}, "max_tokens", "invalid_type"),
        ({"max_tokens": 2, "min_tokens": 3}, "min_tokens", "invalid_value"),
        ({"stop": 3}, "stop", "invalid_type"),
        ({"stop": ["a", 3]}, "stop", "invalid_type"),
        ({"stop": ["x"] * 17}, "stop", "invalid_value"),
        ({"stop": ""}, "stop", "invalid_value"),
        ({"stop": "x" * 257}, "stop", "invalid_value"),
        ({"stop_token_ids": ["1"]}, "stop_token_ids[0]", "invalid_type"),
        ({"stop_token_ids": [1] * 65}, "stop_token_ids", "invalid_value"),
        ({"stream": "yes"}, "stream", "invalid_type"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "invalid_value"),
        (
            {"stream": True, "stream_options": {"include_usage": 1}},
            "stream_options.include_usage",
            "invalid_type",
        ),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x", "unknown_parameter"),
        ({"cache_salt": "x" * 257}, "cache_salt", "invalid_value"),
        ({"cache_salt": 3}, "cache_salt", "invalid_type"),
        ({"max_token": 3}, "max_token", "unknown_parameter"),
        ({"x" * 1000: 3}, "x" * 64, "unknown_parameter"),
        ({"n": 1_000_000}, "n", "invalid_value"),
        ({"n": 0}, "n", "invalid_value"),
        ({"n": 1.5}, "n", "invalid_type"),
        ({"timeout": "5"}, "timeout", "invalid_type"),
        ({"priority": 0.5}, "priority", "invalid_type"),
        ({"model": None}, "model", "invalid_type"),
        ({"prompt_logprobs": 1}, "prompt_logprobs", "unknown_parameter"),
    ],
)
@pytest.mark.parametrize("make", [chat, completion])
def test_refusals_of_both_routes(make: Any, fields: dict[str, Any], param: str, code: str) -> None:
    refused = refusal(make, **fields)
    assert (refused.param, refused.code) == (param, code)
    assert len(refused.message) < 400


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"messages": "hi"}, "messages", "invalid_type"),
        ({"messages": ["hi"]}, "messages[0]", "invalid_type"),
        ({"logprobs": 3}, "logprobs", "invalid_type"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "invalid_value"),
        ({"top_logprobs": 2}, "top_logprobs", "invalid_value"),
        ({"tools": [TOOL] * 129}, "tools", "invalid_value"),
        ({"tools": ["f"]}, "tools[0]", "invalid_type"),
        ({"tools": [{"type": "custom"}]}, "tools[0].type", "unsupported_parameter"),
        ({"tools": [{"type": "function"}]}, "tools[0].function", "invalid_type"),
        (
            {"tools": [{"type": "function", "function": {}}]},
            "tools[0].function.name",
            "invalid_type",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "strict": True}}]},
            "tools[0].function.strict",
            "unsupported_parameter",
        ),
        ({"tool_choice": "required"}, "tool_choice", "unsupported_parameter"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "f"}}},
            "tool_choice",
            "unsupported_parameter",
        ),
        (
            {"chat_template_kwargs": {"tokenize": False}},
            "chat_template_kwargs.tokenize",
            "unknown_parameter",
        ),
        ({"chat_template": "{{ x }}"}, "chat_template", "unknown_parameter"),
        (
            {"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False}},
            "enable_thinking",
            "invalid_value",
        ),
        ({"echo": True}, "echo", "unsupported_parameter"),
    ],
)
def test_refusals_of_chat(fields: dict[str, Any], param: str, code: str) -> None:
    refused = refusal(chat, **fields)
    assert (refused.param, refused.code) == (param, code)


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"prompt": None}, "prompt", "missing_required_parameter"),
        ({"prompt": []}, "prompt", "invalid_type"),
        ({"prompt": 3}, "prompt", "invalid_type"),
        ({"prompt": ["a", 1]}, "prompt", "invalid_type"),
        ({"prompt": [1, "a"]}, "prompt", "invalid_type"),
        ({"prompt": [True]}, "prompt", "invalid_type"),
        ({"prompt": [[1], "a"]}, "prompt", "invalid_type"),
        ({"prompt": [1.5]}, "prompt", "invalid_type"),
        ({"prompt": ["a"] * 65}, "prompt", "invalid_value"),
        ({"logprobs": True}, "logprobs", "invalid_type"),
        ({"logprobs": 21}, "logprobs", "invalid_value"),
        ({"logprobs": 1, "echo": True}, "echo", "unsupported_parameter"),
        ({"suffix": "x"}, "suffix", "unsupported_parameter"),
        ({"messages": MESSAGES}, "messages", "unknown_parameter"),
        ({"tools": [TOOL]}, "tools", "unknown_parameter"),
        ({"max_completion_tokens": 3}, "max_completion_tokens", "unknown_parameter"),
    ],
)
def test_refusals_of_completions(fields: dict[str, Any], param: str, code: str) -> None:
    refused = refusal(completion, **fields)
    assert (refused.param, refused.code) == (param, code)


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
        (["a"] * 64, ["a"] * 64),
    ],
)
def test_the_four_forms_of_a_prompt(prompt: Any, prompts: list[Any]) -> None:
    assert completion(prompt=prompt).prompts == prompts


@pytest.mark.parametrize(
    ("model", "param"),
    [(ChatRequest, "messages"), (CompletionRequest, "prompt")],
)
def test_required_fields(model: type[GenerationRequest], param: str) -> None:
    for missing, fields in (("model", {param: "x"}), (param, {"model": "toy"})):
        with pytest.raises(InvalidRequest) as refused:
            parse_request(json.dumps(fields).encode(), model)
        assert (refused.value.param, refused.value.code) == (missing, "missing_required_parameter")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"hi",
        b"[]",
        b"null",
        b'"x"',
        b'{"model": "toy"',
        b'{"temperature": NaN}',
        b'{"model": "\\ud800"}',
        b"\xff\xfe",
        b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    ],
)
def test_a_body_that_is_no_json_object_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidRequest) as refused:
        parse_request(data, ChatRequest)
    assert refused.value.code == "invalid_json"
    assert len(refused.value.message) < 400


def test_another_model_is_not_found() -> None:
    with pytest.raises(InvalidRequest) as refused:
        choose_adapter(chat(model="gpt-4").model, "toy", ["mine"])
    assert (refused.value.param, refused.value.code) == ("model", "model_not_found")
    assert choose_adapter(chat().model, "toy", ["mine"]) is None
    assert choose_adapter(chat(model="mine").model, "toy", ["mine"]) == "mine"
