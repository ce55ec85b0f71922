"""Starlette behind a no-op `BaseHTTPMiddleware` and `GZipMiddleware`, the two that hide most."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Mount, Route

from qwen3_asgi import DisconnectMiddleware, create_app
from tests.hosts.apps.stage import Stage, params

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from starlette.middleware.base import RequestResponseEndpoint
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import ASGIApp


async def pass_on(request: Request, call_next: RequestResponseEndpoint) -> Response:
    return await call_next(request)


def build(
    stage: Stage, *, watched: bool = True, stack: Sequence[Middleware] | None = None
) -> Starlette:
    """`watched=False` leaves `DisconnectMiddleware` out: the mounted app's own watch remains.

    `stack` is all the middleware instead, ours included.
    """
    engine = stage.engine

    async def generate(request: Request) -> Response:
        asked = await request.json()
        with stage.noting():
            output = await engine.generate(prompt=asked["prompt"], params=params(asked))
        return JSONResponse({"tokens": len(output.token_ids)})

    async def in_thread(request: Request) -> Response:
        asked = await request.json()

        def work() -> int:
            with stage.noting():
                output = engine.generate_sync(prompt=asked["prompt"], params=params(asked))
            return len(output.token_ids)

        return JSONResponse({"tokens": await run_in_threadpool(work)})

    async def stream(request: Request) -> Response:
        asked = await request.json()

        async def lines() -> AsyncIterator[str]:
            with stage.noting():
                async for delta in engine.stream(prompt=asked["prompt"], params=params(asked)):
                    yield f"data: {len(delta.token_ids)}\n"

        return StreamingResponse(lines(), media_type="text/plain")

    watch = [Middleware(DisconnectMiddleware)] if watched else []
    hiding = [
        Middleware(BaseHTTPMiddleware, dispatch=pass_on),
        Middleware(GZipMiddleware, minimum_size=1),
    ]
    return Starlette(
        routes=[
            Route("/generate", generate, methods=["POST"]),
            Route("/sync", in_thread, methods=["POST"]),
            Route("/stream", stream, methods=["POST"]),
            Mount("/llm", create_app(engine, registry=stage.registry)),
        ],
        middleware=stack or [*watch, *hiding],
    )


def make() -> ASGIApp:
    stage = Stage()
    return stage.controlled(build(stage))


def make_unwatched() -> ASGIApp:
    stage = Stage()
    return stage.controlled(build(stage, watched=False))
