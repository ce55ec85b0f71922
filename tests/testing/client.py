"""A client over the transport, and the messages of an app that answers."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import anyio
import httpx

from qwen3_asgi.testing import DisconnectingASGITransport

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from starlette.types import ASGIApp, Message

DISCONNECT: Message = {"type": "http.disconnect"}
START: Message = {"type": "http.response.start", "status": 201, "headers": [(b"x-a", b"b")]}
END: Message = {"type": "http.response.body", "body": b""}


def chunk(body: bytes) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": True}


class Client(NamedTuple):
    http: httpx.AsyncClient
    transport: DisconnectingASGITransport


@asynccontextmanager
async def client(app: ASGIApp, **options: Any) -> AsyncIterator[Client]:
    transport = DisconnectingASGITransport(app, **options)
    with anyio.fail_after(20):
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            yield Client(http, transport)
