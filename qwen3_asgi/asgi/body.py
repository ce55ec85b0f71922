"""Reads a request body up to a limit, straight from `receive`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qwen3_asgi.asgi.headers import header
from qwen3_asgi.errors import ClientDisconnected, InvalidRequest

if TYPE_CHECKING:
    from starlette.types import Receive, Scope

DEFAULT_MAX_BODY_BYTES = 8 * 1024 * 1024


async def read_body(scope: Scope, receive: Receive, max_bytes: int) -> bytes:
    """Return the whole body.

    Raises:
        InvalidRequest: it is longer than `max_bytes` (code `request_too_large`).
        ClientDisconnected: the client left before it was complete.
    """
    announced = _content_length(scope)
    if announced is not None and announced > max_bytes:
        raise _too_large(max_bytes)
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected("the client left while sending its request")
        part = message.get("body", b"")
        size += len(part)
        # The header may be absent (chunked) or a lie, so the bytes are counted as well.
        if size > max_bytes:
            raise _too_large(max_bytes)
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


def _content_length(scope: Scope) -> int | None:
    value = header(scope, b"content-length")
    return int(value[:20]) if value is not None and value.isdigit() else None


def _too_large(max_bytes: int) -> InvalidRequest:
    return InvalidRequest(
        f"the request body is larger than {max_bytes} bytes", code="request_too_large"
    )
