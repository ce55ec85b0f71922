"""The other hosts with the instrumentator they have anyway, and its own `/metrics`.

Their middleware is pure ASGI (or Django's own), hides nothing, and so may stand outside of ours.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_fastapi_instrumentator import Instrumentator
from starlette_exporter import PrometheusMiddleware, handle_metrics

from tests.hosts.apps import django_host, fastapi_host, starlette_host
from tests.hosts.apps.stage import Stage

if TYPE_CHECKING:
    from starlette.types import ASGIApp


def make_instrumentator() -> ASGIApp:
    stage = Stage()
    app = fastapi_host.build(stage)
    Instrumentator(should_group_status_codes=False).instrument(app).expose(app)
    return stage.controlled(app)


def make_exporter() -> ASGIApp:
    stage = Stage()
    app = starlette_host.build(stage)
    app.add_middleware(PrometheusMiddleware)
    app.add_route("/metrics", handle_metrics)
    return stage.controlled(app)


def make_django() -> ASGIApp:
    stage = Stage()
    return stage.controlled(django_host.build(stage, instrumented=True))
