"""Django's ASGI handler with the mounted app beside it; Django runs on asyncio only."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from django.conf import settings
from django.http import HttpRequest, HttpResponse, JsonResponse, StreamingHttpResponse
from django.urls import path

from qwen3_asgi import ClientDisconnected, DisconnectMiddleware, create_app
from tests.hosts.apps.stage import Stage, params

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from starlette.types import ASGIApp, Receive, Scope, Send


def build(stage: Stage) -> ASGIApp:
    """At most once in a process: Django's settings and urls are global."""
    engine = stage.engine

    async def generate(request: HttpRequest) -> HttpResponse:
        asked = json.loads(request.body)
        try:
            with stage.noting():
                output = await engine.generate(prompt=asked["prompt"], params=params(asked))
        except ClientDisconnected:
            return HttpResponse(status=499)  # or Django logs it as its own internal error
        return JsonResponse({"tokens": len(output.token_ids)})

    def in_thread(request: HttpRequest) -> HttpResponse:
        asked = json.loads(request.body)
        try:
            with stage.noting():
                output = engine.generate_sync(prompt=asked["prompt"], params=params(asked))
        except ClientDisconnected:
            return HttpResponse(status=499)
        return JsonResponse({"tokens": len(output.token_ids)})

    async def stream(request: HttpRequest) -> StreamingHttpResponse:
        asked = json.loads(request.body)

        async def lines() -> AsyncIterator[str]:
            with stage.noting():
                async for delta in engine.stream(prompt=asked["prompt"], params=params(asked)):
                    yield f"data: {len(delta.token_ids)}\n"

        return StreamingHttpResponse(lines(), content_type="text/plain")

    urls = [path("generate", generate), path("sync", in_thread), path("stream", stream)]
    settings.configure(
        ALLOWED_HOSTS=["*"],
        SECRET_KEY="only for tests",
        ROOT_URLCONF=tuple(urls),
        MIDDLEWARE=[
            "django.middleware.gzip.GZipMiddleware",
            "django.middleware.common.CommonMiddleware",
        ],
    )
    from django.core.asgi import get_asgi_application

    django = get_asgi_application()
    llm = create_app(engine, registry=stage.registry)

    async def dispatch(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith("/llm/"):
            await llm({**scope, "root_path": scope.get("root_path", "") + "/llm"}, receive, send)
        elif scope["type"] == "http":
            await django(scope, receive, send)

    return DisconnectMiddleware(dispatch)


def make() -> ASGIApp:
    stage = Stage()
    return stage.controlled(build(stage))
