"""Which HTTP status, headers and body each error gets. The only place that knows status codes."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from starlette.exceptions import HTTPException
from starlette.responses import Response

from qwen3_asgi.asgi.responses import encode_json, send_json
from qwen3_asgi.errors import (
    EngineDead,
    EngineNotReady,
    EngineOverloaded,
    GenerationCancelled,
    GenerationFailed,
    GenerationTimeout,
    InvalidRequest,
)
from qwen3_asgi.openai.errors import error_body

if TYPE_CHECKING:
    from collections.abc import Mapping

    from starlette.requests import Request
    from starlette.types import Send

logger = logging.getLogger("qwen3_asgi.asgi")

_INVALID_STATUS = {
    "lora_loading_disabled": 403,
    "model_not_found": 404,
    "request_too_large": 413,
}
# A dead engine needs a restart: there is no use in asking again at once.
_DEAD_RETRY_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class ErrorReply:
    status: int
    body: dict[str, Any]
    headers: Mapping[str, str] = field(default_factory=dict)


def error_reply(error: Exception) -> ErrorReply:
    """Map an error to its reply; what we did not expect says nothing about our insides."""
    match error:
        case InvalidRequest():
            body = error_body(
                error.message, type="invalid_request_error", param=error.param, code=error.code
            )
            return ErrorReply(_INVALID_STATUS.get(error.code, 400), body)
        case EngineOverloaded():
            body = error_body(str(error), type="rate_limit_error", code="engine_overloaded")
            return ErrorReply(429, body, _retry_after(error.retry_after))
        case EngineNotReady():
            body = error_body(str(error), type="server_error", code="engine_not_ready")
            return ErrorReply(503, body, _retry_after(error.retry_after))
        case EngineDead():
            body = error_body(str(error), type="server_error", code="engine_dead")
            return ErrorReply(503, body, _retry_after(_DEAD_RETRY_SECONDS))
        case GenerationCancelled():
            body = error_body(str(error), type="server_error", code="generation_cancelled")
            return ErrorReply(503, body, _retry_after(1.0))
        case GenerationTimeout():
            body = error_body(str(error), type="timeout_error", code="generation_timeout")
            # OpenAI's clients ask again after a 504, for the same work under the same deadline.
            return ErrorReply(504, body, {"x-should-retry": "false"})
        case GenerationFailed():
            body = error_body(str(error), type="server_error", code="generation_failed")
            return ErrorReply(500, body)
        case _:
            body = error_body("internal server error", type="server_error", code="internal_error")
            return ErrorReply(500, body)


async def send_error(send: Send, error: Exception) -> None:
    reply = error_reply(error)
    if reply.status == 500:
        logger.error("a request failed", exc_info=error)
    await send_json(send, reply.body, status=reply.status, headers=reply.headers)


def error_response(error: Exception) -> Response:
    """`error_reply` for routes that return a Starlette response."""
    reply = error_reply(error)
    return Response(
        encode_json(reply.body), reply.status, dict(reply.headers), media_type="application/json"
    )


def http_exception_response(request: Request, error: Exception) -> Response:
    """Starlette's own refusals (404, 405) in OpenAI's shape."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    headers = dict(error.headers or {}) if isinstance(error, HTTPException) else {}
    phrase = HTTPStatus(status).phrase
    body = error_body(
        f"{phrase}: {request.method} {request.url.path[:256]}",
        type="invalid_request_error" if status < 500 else "server_error",
        code=phrase.lower().replace(" ", "_"),
    )
    return Response(encode_json(body), status, headers, "application/json")


def unexpected_error_response(request: Request, error: Exception) -> Response:
    """A bug's reply. Starlette raises the error again after it, for the server to log."""
    return error_response(error)


def _retry_after(seconds: float) -> dict[str, str]:
    return {"retry-after": str(max(1, math.ceil(seconds)))}
