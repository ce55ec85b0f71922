"""The app two mounts deep, middleware on both levels, and `DisconnectMiddleware` nowhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.routing import Mount

from qwen3_asgi import create_app
from tests.hosts.apps.stage import Stage
from tests.hosts.apps.starlette_host import pass_on

if TYPE_CHECKING:
    from starlette.types import ASGIApp


def build(stage: Stage) -> ASGIApp:
    inner = Starlette(
        routes=[Mount("/llm", create_app(stage.engine, registry=stage.registry))],
        middleware=[Middleware(BaseHTTPMiddleware, dispatch=pass_on)],
    )
    return Starlette(
        routes=[Mount("/tools", inner)], middleware=[Middleware(GZipMiddleware, minimum_size=1)]
    )


def make() -> ASGIApp:
    stage = Stage()
    return stage.controlled(build(stage))
