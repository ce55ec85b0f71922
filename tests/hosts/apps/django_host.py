"""Django's ASGI handler with the mounted app beside it; Django runs on asyncio only."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from django.conf import settings
from django.core.asgi import get_asgi_application
from django.http import HttpRequest, HttpResponse, JsonResponse, StreamingHttpResponse
from django.urls import path
from django_prometheus.exports import ExportToDjangoView

from qwen3_asgi import ClientDisconnected, DisconnectMiddleware, create_app
from tests.hosts.apps.stage import Stage, params

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from django.urls import URLPattern
    from starlette.types import ASGIApp, Receive, Scope, Send


def build(stage: Stage, *, instrumented: bool = False) -> ASGIApp:
    """`instrumented` adds django-prometheus and its `/metrics`."""
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
    middleware = [
        "django.middleware.gzip.GZipMiddleware",
        "django.middleware.common.CommonMiddleware",
    ]
    if instrumented:
        urls.append(path("metrics", ExportToDjangoView))
        before, after = "PrometheusBeforeMiddleware", "PrometheusAfterMiddleware"
        middleware.insert(0, f"django_prometheus.middleware.{before}")
        middleware.append(f"django_prometheus.middleware.{after}")
    configure(urls, *middleware)
    return beside(get_asgi_application(), create_app(engine, registry=stage.registry))


def configure(urls: list[URLPattern], *middleware: str) -> None:
    """Django's settings are global to the process; its handler takes them when it is made."""
    if not settings.configured:
        settings.configure(ALLOWED_HOSTS=["*"], SECRET_KEY="only for tests")
    settings.ROOT_URLCONF = tuple(urls)
    settings.MIDDLEWARE = list(middleware)


def beside(django: ASGIApp, llm: ASGIApp) -> ASGIApp:
    async def dispatch(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith("/llm/"):
            await llm({**scope, "root_path": scope.get("root_path", "") + "/llm"}, receive, send)
        elif scope["type"] == "http":
            await django(scope, receive, send)

    return DisconnectMiddleware(dispatch)


def make() -> ASGIApp:
    stage = Stage()
    return stage.controlled(build(stage))
