"""Sends a whole response in two ASGI messages. Knows JSON and headers, nothing about engines."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from starlette.types import Send


def encode_json(payload: Any) -> bytes:
    return json.dumps(payload, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def raw_headers(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    return [
        (name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()
    ]


async def send_json(
    send: Send, payload: Any, *, status: int = 200, headers: Mapping[str, str] | None = None
) -> None:
    body = encode_json(payload)
    await send(
        {
            "type": "http.response.start",
            "status": status,
            "headers": raw_headers(
                {
                    "content-type": "application/json",
                    "content-length": str(len(body)),
                    **(headers or {}),
                }
            ),
        }
    )
    await send({"type": "http.response.body", "body": body, "more_body": False})
