"""Bearer authentication as pure ASGI, compared in constant time."""

from __future__ import annotations

import hmac
from typing import TYPE_CHECKING

from qwen3_asgi.asgi.headers import header
from qwen3_asgi.asgi.responses import send_json
from qwen3_asgi.openai.errors import error_body

if TYPE_CHECKING:
    from collections.abc import Sequence

    from starlette.types import ASGIApp, Receive, Scope, Send


class ApiKeyAuth:
    """Lets a request through if its `Authorization` header is `Bearer` and one of the keys."""

    def __init__(self, app: ASGIApp, *, keys: Sequence[str]) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._admits(_bearer(scope)):
            await send_json(
                send,
                error_body(
                    "the API key is missing or wrong",
                    type="invalid_request_error",
                    code="invalid_api_key",
                ),
                status=401,
                headers={"www-authenticate": "Bearer"},
            )
            return
        await self._app(scope, receive, send)

    def _admits(self, token: bytes) -> bool:
        # Every key is compared, so that the time does not tell which one came close.
        matches = [hmac.compare_digest(token, key) for key in self._keys]
        return any(matches)


def _bearer(scope: Scope) -> bytes:
    scheme, _, token = (header(scope, b"authorization") or b"").partition(b" ")
    return token.strip() if scheme.lower() == b"bearer" else b""
