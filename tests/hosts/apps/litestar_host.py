"""Litestar with the app mounted by an `asgi` handler, as Litestar does it."""

# No `from __future__ import annotations`: Litestar resolves annotations in the module's globals,
# and the handlers are made inside `build`.

from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Annotated, Any

from litestar import Litestar, Request, Response, asgi, post
from litestar import WebSocket as LitestarWebSocket
from litestar.handlers import websocket
from litestar.logging import LoggingConfig
from litestar.params import Body
from litestar.response import Stream
from starlette.types import ASGIApp, Receive, Scope, Send

from qwen3_asgi import ClientDisconnected, DisconnectMiddleware, create_app
from tests.hosts.apps.stage import Stage, params

Asked = Annotated[dict[str, Any], Body()]


def gone(request: Request[Any, Any, Any], error: ClientDisconnected) -> Response[None]:
    return Response(None, status_code=499)  # or Litestar answers it as its own internal error


def build(stage: Stage) -> ASGIApp:
    engine = stage.engine
    llm = create_app(engine, registry=stage.registry)

    @post("/generate", status_code=200)
    async def generate(data: Asked) -> dict[str, int]:
        with stage.noting():
            output = await engine.generate(prompt=data["prompt"], params=params(data))
        return {"tokens": len(output.token_ids)}

    @post("/sync", status_code=200, sync_to_thread=True)
    def in_thread(data: Asked) -> dict[str, int]:
        with stage.noting():
            output = engine.generate_sync(prompt=data["prompt"], params=params(data))
        return {"tokens": len(output.token_ids)}

    @post("/stream", status_code=200)
    async def stream(data: Asked) -> Stream:
        async def lines() -> AsyncIterator[str]:
            # In the middle of an answer Litestar wraps what is raised in an error of its own.
            with suppress(ClientDisconnected), stage.noting():
                async for delta in engine.stream(prompt=data["prompt"], params=params(data)):
                    yield f"data: {len(delta.token_ids)}\n"

        return Stream(lines(), media_type="text/plain")

    @websocket("/ws/stream")
    async def talk(socket: LitestarWebSocket[Any, Any, Any]) -> None:
        await socket.accept()
        asked = await socket.receive_json()
        count = 0
        with stage.noting():
            async for delta in engine.stream(prompt=asked["prompt"], params=params(asked)):
                count += len(delta.token_ids)
                await socket.send_json({"text": delta.text})
        await socket.send_json({"tokens": count})
        await socket.close()

    @asgi("/llm", is_mount=True, copy_scope=True)
    async def mounted(scope: Scope, receive: Receive, send: Send) -> None:
        # Litestar takes the mount's path away and adds a slash, which no route of ours has.
        await llm({**scope, "path": scope["path"].rstrip("/")}, receive, send)

    app = Litestar(
        [generate, in_thread, stream, talk, mounted],
        lifespan=[engine.lifespan],
        exception_handlers={ClientDisconnected: gone},
        logging_config=LoggingConfig(
            log_exceptions="always",
            disable_stack_trace={ClientDisconnected},  # no exceptions to log
            configure_root_logger=False,
            loggers={"litestar": {"level": "INFO", "propagate": True}},
        ),
        openapi_config=None,
    )
    return DisconnectMiddleware(app)


def make() -> ASGIApp:
    stage = Stage()
    return stage.controlled(build(stage))
