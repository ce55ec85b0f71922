"""An app that takes uploads, under `/watched` behind the middleware and under `/bare` without it.

It reads a body at once, when the test says so, or not at all, and generates meanwhile if asked to.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread
from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Mount

from qwen3_asgi import DisconnectMiddleware, SamplingParams
from tests.hosts.apps.stage import Stage

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send


class Uploads:
    """The app. Its paths: `/discard`, `/later` and `/refuse`; with `?generating` it does."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._reading = 0
        self._go_on = anyio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"].rsplit("/", 1)[1]
        if path == "state":
            await JSONResponse({"reading": self._reading})(scope, receive, send)
        elif path == "go-on":
            self._go_on.set()
            await JSONResponse({})(scope, receive, send)
        elif scope["query_string"] == b"generating":
            await self._beside_a_generation(path, scope, receive, send)
        else:
            await self._answer(path, scope, receive, send)

    async def _beside_a_generation(
        self, path: str, scope: Scope, receive: Receive, send: Send
    ) -> None:
        params = SamplingParams(max_tokens=3000)
        handle = await self._stage.engine.submit(prompt="a long story", params=params)
        try:
            # Its next step is held: it is there from the first byte to the last.
            await anyio.to_thread.run_sync(self._stage.hold)
            await self._answer(path, scope, receive, send)
        finally:
            handle.cancel()
            self._stage.release()

    async def _answer(self, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        if path == "refuse":
            await JSONResponse({"refused": True}, status_code=417)(scope, receive, send)
            return
        if path == "later":
            self._go_on = anyio.Event()
            self._reading += 1
            await self._go_on.wait()
        digest = hashlib.sha256()
        size = 0
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body = message.get("body", b"")
            size += len(body)
            digest.update(body)
            more = message.get("more_body", False)
        live = self._stage.engine.load().num_running
        answer = {"size": size, "sha256": digest.hexdigest(), "live": live}
        await JSONResponse(answer)(scope, receive, send)


def make() -> ASGIApp:
    uploads = Uploads(Stage(CollectorRegistry()))
    return Starlette(
        routes=[Mount("/bare", uploads), Mount("/watched", DisconnectMiddleware(uploads))]
    )
