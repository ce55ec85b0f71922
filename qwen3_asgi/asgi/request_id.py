"""Echoes a client's `X-Request-Id` in the response, for its logs; it is never a key of ours.

Two clients may send the same id; requests are told apart by ids that the engine makes.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from qwen3_asgi.asgi.headers import header

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

_HEADER = b"x-request-id"
# Bounded, and no character that could end a header line or mean something in a log.
_VALID = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}")


class RequestIdEcho:
    """Pure ASGI. An id that is not valid is dropped, not refused."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_id = _request_id(scope) if scope["type"] == "http" else None
        if request_id is None:
            await self._app(scope, receive, send)
            return

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [*message.get("headers", ()), (_HEADER, request_id)]
                message = {**message, "headers": headers}
            await send(message)

        await self._app(scope, receive, send_with_id)


def _request_id(scope: Scope) -> bytes | None:
    value = header(scope, _HEADER)
    return value if value is not None and _VALID.fullmatch(value) else None
