"""Quart with the mounted app beside it; Quart runs on asyncio only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quart import Quart, Response, request, websocket
from quart.utils import run_sync

from qwen3_asgi import ClientDisconnected, DisconnectMiddleware, create_app
from tests.hosts.apps.stage import Stage, params

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from starlette.types import ASGIApp, Receive, Scope, Send


def build(stage: Stage) -> ASGIApp:
    engine = stage.engine
    quart = Quart(__name__)
    quart.config["RESPONSE_TIMEOUT"] = None  # a minute by default, for streams as well

    @quart.errorhandler(ClientDisconnected)
    async def gone(error: ClientDisconnected) -> tuple[str, int]:
        return "", 499  # or Quart logs it as its own internal error

    @quart.while_serving
    async def serving() -> AsyncIterator[None]:
        async with engine:
            yield

    @quart.post("/generate")
    async def generate() -> dict[str, int]:
        asked = await request.get_json()
        with stage.noting():
            output = await engine.generate(prompt=asked["prompt"], params=params(asked))
        return {"tokens": len(output.token_ids)}

    @quart.post("/sync")
    async def in_thread() -> dict[str, int]:
        asked = await request.get_json()

        def work() -> int:
            with stage.noting():
                output = engine.generate_sync(prompt=asked["prompt"], params=params(asked))
            return len(output.token_ids)

        return {"tokens": await run_sync(work)()}

    @quart.post("/stream")
    async def stream() -> Response:
        asked = await request.get_json()

        async def lines() -> AsyncIterator[str]:
            with stage.noting():
                async for delta in engine.stream(prompt=asked["prompt"], params=params(asked)):
                    yield f"data: {len(delta.token_ids)}\n"

        return Response(lines(), content_type="text/plain")

    @quart.websocket("/ws/stream")
    async def talk() -> None:
        asked = await websocket.receive_json()
        count = 0
        with stage.noting():
            async for delta in engine.stream(prompt=asked["prompt"], params=params(asked)):
                count += len(delta.token_ids)
                await websocket.send_json({"text": delta.text})
        await websocket.send_json({"tokens": count})

    llm = create_app(engine, registry=stage.registry)
    inner = quart.asgi_app

    async def beside(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith("/llm/"):
            await llm({**scope, "root_path": scope.get("root_path", "") + "/llm"}, receive, send)
        else:
            await inner(scope, receive, send)

    quart.asgi_app = DisconnectMiddleware(beside)  # where Quart wants middleware to be
    return quart


def make() -> ASGIApp:
    stage = Stage()
    return stage.controlled(build(stage))
