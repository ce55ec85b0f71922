"""Chat messages are accepted as clients write them, or refused with their place named."""

from __future__ import annotations

from typing import Any

import pytest

from qwen3_asgi.errors import InvalidRequest
from qwen3_asgi.text.messages import normalise_messages

Message = dict[str, Any]


def one(message: Message) -> Message:
    return normalise_messages([message])[0]


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, ""),
        ("hi", "hi"),
        ([], ""),
        ([{"type": "text", "text": "a"}], "a"),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "a\nb"),
        (["a", {"type": "text", "text": "b"}], "a\nb"),
    ],
)
def test_content_becomes_a_string(content: object, text: str) -> None:
    assert one({"role": "user", "content": content}) == {"role": "user", "content": text}


def test_missing_content_is_empty() -> None:
    assert one({"role": "assistant"})["content"] == ""


def test_developer_is_system() -> None:
    assert one({"role": "developer", "content": "x"})["role"] == "system"


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content"])
def test_both_names_of_reasoning_are_read(field: str) -> None:
    assert one({"role": "assistant", field: "why"})["reasoning_content"] == "why"


@pytest.mark.parametrize(
    ("arguments", "parsed"),
    [
        ('{"a": 1}', {"a": 1}),
        ({"a": 1}, {"a": 1}),
        (None, {}),
        ("", {}),
        ("not json", "not json"),
        ("[1]", "[1]"),
        ("[" * 100_000, "[" * 100_000),
    ],
)
def test_tool_call_arguments_become_objects_where_they_are(
    arguments: object, parsed: object
) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    message = one({"role": "assistant", "tool_calls": [call]})
    assert message["tool_calls"] == [
        {"type": "function", "function": {"name": "f", "arguments": parsed}}
    ]


def test_what_clients_send_back_of_a_reply_is_accepted() -> None:
    replayed: Message = {
        "role": "assistant",
        "content": "x",
        "refusal": None,
        "annotations": [],
        "audio": None,
        "function_call": None,
        "tool_calls": None,
        "name": "bot",
    }
    assert one(replayed) == {"role": "assistant", "content": "x", "name": "bot"}


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"content": "x"}, "messages[0].role"),
        ({"role": "alien", "content": "x"}, "messages[0].role"),
        ({"role": ["user"], "content": "x"}, "messages[0].role"),
        ({"role": "function", "content": "x"}, "messages[0].role"),
        ({"role": "user", "content": 1}, "messages[0].content"),
        ({"role": "user", "content": {"type": "text"}}, "messages[0].content"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {}}]},
            "messages[0].content[0].type",
        ),
        (
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "input_audio"}]},
            "messages[0].content[1].type",
        ),
        ({"role": "user", "content": [1]}, "messages[0].content[0]"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0].text"),
        ({"role": "user", "content": "x", "name": 1}, "messages[0].name"),
        ({"role": "user", "content": "x", "reasoning": "y"}, "messages[0].reasoning"),
        ({"role": "assistant", "content": "x", "prefix": True}, "messages[0].prefix"),
        ({"role": "assistant", "reasoning": 1}, "messages[0].reasoning"),
        ({"role": "assistant", "tool_calls": "x"}, "messages[0].tool_calls"),
        ({"role": "assistant", "tool_calls": [1]}, "messages[0].tool_calls[0].function"),
        (
            {"role": "assistant", "tool_calls": [{"function": {}}]},
            "messages[0].tool_calls[0].function.name",
        ),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 3}}]},
            "messages[0].tool_calls[0].function.arguments",
        ),
        ("hi", "messages[0]"),
    ],
)
def test_a_refusal_names_the_place(message: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        normalise_messages([message])
    assert refused.value.param == param


@pytest.mark.parametrize("messages", [[], "hi", None, 3])
def test_messages_must_be_a_list_with_something_in_it(messages: Any) -> None:
    with pytest.raises(InvalidRequest) as refused:
        normalise_messages(messages)
    assert refused.value.param == "messages"


def test_a_refusal_is_short_however_long_the_value() -> None:
    with pytest.raises(InvalidRequest) as refused:
        one({"role": "x" * 10_000})
    assert len(refused.value.message) < 300
