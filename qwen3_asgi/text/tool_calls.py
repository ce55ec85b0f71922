"""Reads one tool call as Qwen3 writes it between its tags: a JSON object with name and arguments.

What is not such an object is no call; the caller then shows it as text.
"""

from __future__ import annotations

import json
from typing import NamedTuple, NoReturn


class ToolCall(NamedTuple):
    """`arguments` is a JSON text, as OpenAI's wire format has it."""

    name: str
    arguments: str


def parse_tool_call(text: str) -> ToolCall | None:
    """Return the call, or None when the text is not one. Linear in the text's length."""
    try:
        # `strict=False`: models write raw newlines inside strings.
        call = json.loads(text, strict=False, parse_constant=_not_json)
        if not isinstance(call, dict):
            return None
        name = call.get("name")
        arguments = call.get("arguments", {})
        if not isinstance(name, str) or not name:
            return None
        if isinstance(arguments, str):
            parsed = json.loads(arguments, parse_constant=_not_json)
        else:
            parsed, arguments = arguments, json.dumps(arguments, ensure_ascii=False)
        if not isinstance(parsed, dict):
            return None
        # An escape such as "\\ud800" yields a string that no response could carry.
        (name + arguments).encode()
        return ToolCall(name, arguments)
    except (ValueError, RecursionError):
        return None


def _not_json(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")
