"""Server-sent event frames: a value in, the bytes on the wire out."""

from __future__ import annotations

from typing import Any

from qwen3_asgi.asgi.responses import encode_json

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"


def json_event(payload: Any) -> bytes:
    """One event with a JSON payload. JSON escapes line breaks, so it is always one data line."""
    return b"data: " + encode_json(payload) + b"\n\n"
