"""The body of an error in OpenAI's shape; clients dispatch on `type` and `code`."""

from __future__ import annotations

from typing import Any


def error_body(
    message: str, *, type: str, code: str | None = None, param: str | None = None
) -> dict[str, Any]:
    return {"error": {"message": message, "type": type, "param": param, "code": code}}
