"""FastAPI with a no-op `@app.middleware("http")`, as most FastAPI apps have one."""

# No `from __future__ import annotations`: FastAPI resolves annotations in the module's globals,
# and the endpoints are made inside `build`.

from collections.abc import AsyncIterator

from fastapi import FastAPI, Request
from fastapi.middleware.gzip import GZipMiddleware
from fastapi.responses import Response, StreamingResponse
from pydantic import BaseModel
from starlette.middleware.base import RequestResponseEndpoint
from starlette.types import ASGIApp

from qwen3_asgi import DisconnectMiddleware, SamplingParams, create_app
from tests.hosts.apps.stage import Stage


class Asked(BaseModel):
    prompt: str
    max_tokens: int

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(max_tokens=self.max_tokens)


def build(stage: Stage) -> FastAPI:
    engine = stage.engine
    app = FastAPI(lifespan=engine.lifespan)
    app.mount("/llm", create_app(engine, registry=stage.registry))
    app.add_middleware(GZipMiddleware, minimum_size=1)

    @app.middleware("http")
    async def pass_on(request: Request, call_next: RequestResponseEndpoint) -> Response:
        return await call_next(request)

    app.add_middleware(DisconnectMiddleware)  # the last one added is the outermost

    @app.post("/generate")
    async def generate(asked: Asked) -> dict[str, int]:
        with stage.noting():
            output = await engine.generate(prompt=asked.prompt, params=asked.params)
        return {"tokens": len(output.token_ids)}

    @app.post("/sync")
    def in_thread(asked: Asked) -> dict[str, int]:
        with stage.noting():
            output = engine.generate_sync(prompt=asked.prompt, params=asked.params)
        return {"tokens": len(output.token_ids)}

    @app.post("/stream")
    async def stream(asked: Asked) -> StreamingResponse:
        async def lines() -> AsyncIterator[str]:
            with stage.noting():
                async for delta in engine.stream(prompt=asked.prompt, params=asked.params):
                    yield f"data: {len(delta.token_ids)}\n"

        return StreamingResponse(lines(), media_type="text/plain")

    return app


def make() -> ASGIApp:
    stage = Stage()
    return stage.controlled(build(stage))
