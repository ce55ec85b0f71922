"""A tool call is one JSON object; everything else is text, never an exception."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen3_asgi.text.tool_calls import ToolCall, parse_tool_call


@pytest.mark.parametrize(
    ("text", "call"),
    [
        ('\n{"name": "f", "arguments": {"a": 1}}\n', ToolCall("f", '{"a": 1}')),
        ('{"name": "f"}', ToolCall("f", "{}")),
        ('{"name": "f", "arguments": "{\\"a\\": 1}"}', ToolCall("f", '{"a": 1}')),
        ('{"name": "f", "arguments": {"a": "é\n"}}', ToolCall("f", '{"a": "é\\n"}')),
        ('{"arguments": {}, "name": "f", "id": 3}', ToolCall("f", "{}")),
    ],
)
def test_calls(text: str, call: ToolCall) -> None:
    assert parse_tool_call(text) == call


@pytest.mark.parametrize(
    "text",
    [
        "",
        "hello",
        "[]",
        "null",
        '{"name": "f", "arguments": {"a": 1}',
        '{"name": "f"} {"name": "g"}',
        '{"name": "", "arguments": {}}',
        '{"name": 1, "arguments": {}}',
        '{"arguments": {}}',
        '{"name": "f", "arguments": [1]}',
        '{"name": "f", "arguments": null}',
        '{"name": "f", "arguments": "nope"}',
        '{"name": "f", "arguments": "[1]"}',
        '{"name": "f", "arguments": {"a": NaN}}',
        '{"name": "f", "arguments": {"a": "\\ud800"}}',
        '{"name": "f", "arguments": {"a": ' + "9" * 5000 + "}}",
        '{"name": "f", "arguments": ' + "[" * 200_000,
    ],
)
def test_no_calls(text: str) -> None:
    assert parse_tool_call(text) is None


@given(st.text())
def test_never_raises(text: str) -> None:
    parse_tool_call(text)
    parse_tool_call('{"name": "f", "arguments": ' + text)


@given(st.dictionaries(st.text(), st.text() | st.integers() | st.booleans() | st.none()))
def test_arguments_come_back(arguments: dict[str, object]) -> None:
    call = parse_tool_call(json.dumps({"name": "f", "arguments": arguments}))
    assert call is not None
    assert json.loads(call.arguments) == arguments


@pytest.mark.parametrize("filler", ["{", '"', "\\", " ", '{"name": '])
def test_a_million_characters_take_no_time(filler: str) -> None:
    start = time.perf_counter()
    parse_tool_call(filler * (1_000_000 // len(filler)))
    assert time.perf_counter() - start < 2
