"""Turns chat messages as clients write them into the plain dicts a chat template expects.

Called by `Tokenizer.encode_chat`. Whatever the template could not render faithfully is refused
here, with the place in the request named.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from qwen3_asgi.errors import InvalidRequest

_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
_COMMON_FIELDS = frozenset({"role", "content", "name"})
_ROLE_FIELDS = {
    "assistant": frozenset({"tool_calls", "reasoning", "reasoning_content"}),
    "tool": frozenset({"tool_call_id"}),
}
# What OpenAI's clients send back when they replay a reply; empty or without effect on the prompt.
_IGNORED_FIELDS = frozenset({"annotations", "id", "refusal"})


def normalise_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return template-ready messages.

    `content` becomes a string (null: empty; text parts: joined by newlines), `developer` becomes
    `system`, `reasoning` becomes `reasoning_content`, tool-call arguments become objects.

    Raises:
        InvalidRequest: a message has no known role, a part that is not text, or a field that would
            change the prompt in a way the template cannot express.
    """
    if isinstance(messages, (str, bytes)) or not isinstance(messages, Sequence):
        raise InvalidRequest("messages must be a list", param="messages", code="invalid_type")
    if not messages:
        raise InvalidRequest("messages must not be empty", param="messages")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _message(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidRequest(f"{where} must be an object", param=where, code="invalid_type")
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise InvalidRequest(
            f"{where}.role must be one of {', '.join(_ROLES)}, got {_shown(role)}",
            param=f"{where}.role",
        )
    role = _ROLES[role]
    allowed = _COMMON_FIELDS | _ROLE_FIELDS.get(role, frozenset())
    for field, value in message.items():
        if value is not None and field not in allowed and field not in _IGNORED_FIELDS:
            raise InvalidRequest(
                f"{where} has a field that is not supported for this role: {_shown(field)}",
                param=f"{where}.{str(field)[:64]}",
                code="unknown_parameter",
            )
    result: dict[str, Any] = {
        "role": role,
        "content": _content(message.get("content"), f"{where}.content"),
    }
    for field in ("name", "tool_call_id"):
        if message.get(field) is not None:
            result[field] = _string(message[field], f"{where}.{field}")
    for field in ("reasoning", "reasoning_content"):
        if message.get(field) is not None:
            result["reasoning_content"] = _string(message[field], f"{where}.{field}")
    if message.get("tool_calls"):
        result["tool_calls"] = _tool_calls(message["tool_calls"], f"{where}.tool_calls")
    return result


def _content(content: object, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise InvalidRequest(
            f"{where} must be a string, a list of text parts or null",
            param=where,
            code="invalid_type",
        )
    texts: list[str] = []
    for j, part in enumerate(content):
        if isinstance(part, str):
            texts.append(part)
            continue
        if not isinstance(part, Mapping):
            raise InvalidRequest(
                f"{where}[{j}] must be an object", param=f"{where}[{j}]", code="invalid_type"
            )
        if part.get("type") != "text":
            raise InvalidRequest(
                f"{where}[{j}] has type {_shown(part.get('type'))}; this model takes text only",
                param=f"{where}[{j}].type",
            )
        texts.append(_string(part.get("text"), f"{where}[{j}].text"))
    return "\n".join(texts)


def _tool_calls(calls: object, where: str) -> list[dict[str, Any]]:
    if isinstance(calls, str) or not isinstance(calls, Sequence):
        raise InvalidRequest(f"{where} must be a list", param=where, code="invalid_type")
    result: list[dict[str, Any]] = []
    for j, call in enumerate(calls):
        at = f"{where}[{j}]"
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping):
            raise InvalidRequest(
                f"{at}.function must be an object", param=f"{at}.function", code="invalid_type"
            )
        name = _string(function.get("name"), f"{at}.function.name")
        arguments = _arguments(function.get("arguments"), f"{at}.function.arguments")
        result.append({"type": "function", "function": {"name": name, "arguments": arguments}})
    return result


def _arguments(arguments: object, where: str) -> object:
    if arguments is None or arguments == "":
        return {}
    if isinstance(arguments, Mapping):
        return arguments
    text = _string(arguments, where)
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError):
        # A model may have produced it; Qwen3's template renders a string as it stands.
        return text
    return parsed if isinstance(parsed, dict) else text


def _string(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise InvalidRequest(f"{where} must be a string", param=where, code="invalid_type")
    return value


def _shown(value: object) -> str:
    """A value for an error message: bounded, so that a request cannot blow up its own answer."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
