"""Request bytes in, a validated request model out; every refusal names its field.

Called by the routes; small bodies on the event loop, large ones on a thread.
"""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import from_json

from qwen3_asgi.errors import InvalidRequest
from qwen3_asgi.openai.fields import MAX_NAME_CHARS, check_fields

Model = TypeVar("Model", bound=BaseModel)

_TYPE_ERRORS = ("_type", "_parsing")


def parse_request(body: bytes, model: type[Model]) -> Model:
    """Return the request.

    Raises:
        InvalidRequest: the body is no JSON object, a field has a wrong type or is missing, or a
            field asks for something this server does not do.
    """
    try:
        # Bounds nesting, and refuses NaN and lone surrogates, which no response could carry.
        fields: Any = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidRequest(
            f"the request body is not valid JSON: {str(error)[:200]}", code="invalid_json"
        ) from error
    if not isinstance(fields, dict):
        raise InvalidRequest("the request body must be a JSON object", code="invalid_json")
    try:
        request = model.model_validate(fields)
    except ValidationError as error:
        raise _invalid(error, model) from error
    check_fields(request.model_extra or {})
    return request


def _invalid(error: ValidationError, model: type[BaseModel]) -> InvalidRequest:
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    param = _param(first["loc"], model)
    if first["type"] == "missing":
        return InvalidRequest(
            f"missing required parameter: {param!r}",
            param=param,
            code="missing_required_parameter",
        )
    if first["type"] == "extra_forbidden":
        return InvalidRequest(
            f"unknown parameter: {param!r}", param=param, code="unknown_parameter"
        )
    code = "invalid_type" if first["type"].endswith(_TYPE_ERRORS) else "invalid_value"
    return InvalidRequest(f"invalid {param}: {first['msg']}", param=param, code=code)


def _param(loc: tuple[int | str, ...], model: type[BaseModel]) -> str:
    """`("messages", 0)` is `messages[0]`; a union's branch, which pydantic names too, is not."""
    param = str(loc[0])[:MAX_NAME_CHARS]
    for part in loc[1:]:
        if isinstance(part, int):
            param += f"[{part}]"
        elif param in _nested_fields(model):
            return f"{param}.{part[:MAX_NAME_CHARS]}"
    return param


def _nested_fields(model: type[BaseModel]) -> frozenset[str]:
    return frozenset({"stream_options", "chat_template_kwargs"}) & frozenset(model.model_fields)
