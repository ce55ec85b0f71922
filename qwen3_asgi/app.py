"""`create_app(engine)`: the OpenAI-compatible app that a host mounts, or a server runs alone."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from prometheus_client import REGISTRY, CollectorRegistry
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.routing import Route

from qwen3_asgi.asgi.adapters import AdapterRoutes
from qwen3_asgi.asgi.auth import ApiKeyAuth
from qwen3_asgi.asgi.body import DEFAULT_MAX_BODY_BYTES
from qwen3_asgi.asgi.errors import http_exception_response, unexpected_error_response
from qwen3_asgi.asgi.generation import ChatCompletions, Completions, GenerationRoute
from qwen3_asgi.asgi.request_id import RequestIdEcho
from qwen3_asgi.asgi.status import StatusRoutes
from qwen3_asgi.asgi.streaming import DEFAULT_KEEP_ALIVE_SECONDS
from qwen3_asgi.asgi.watch import DisconnectWatch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from starlette.types import Scope

    from qwen3_asgi.asgi.serving import PathLike, ServingEngine


def create_app(
    engine: ServingEngine,
    *,
    api_key: str | Sequence[str] | None = None,
    lora_folders: PathLike | Sequence[PathLike] = (),
    metrics: bool = True,
    registry: CollectorRegistry | None = None,
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES,
    keep_alive_seconds: float = DEFAULT_KEEP_ALIVE_SECONDS,
    allow_priority: bool = False,
) -> Starlette:
    """Return an app with OpenAI's routes under `/v1`, and health, load and metrics beside them.

    Args:
        engine: it is started by the first generation if nothing started it before; many apps may
            share one.
        api_key: one or several keys, any of which a request must bring as its bearer token.
            `/health` and `/ready` stay open.
        lora_folders: LoRA adapters may be loaded over HTTP, from below these folders; none: not at
            all. Whoever may generate may do it, so have a key.
        metrics: put the engine's gauges into the registry and serve it at `/metrics`.
        registry: prometheus_client's default registry when None.
        max_body_bytes: longer request bodies get a 413.
        keep_alive_seconds: a stream that is silent for so long gets a comment, for proxies.
        allow_priority: requests may set `priority`, and so overtake others; else it is refused.

    Raises:
        ValueError: `api_key` or a folder is empty.
    """
    chosen = REGISTRY if registry is None else registry
    if metrics:
        engine.metrics(registry=chosen)
    created = int(time.time())
    status = StatusRoutes(engine, chosen, created)
    adapters = AdapterRoutes(engine, lora_folders, created)
    guard = [] if api_key is None else [Middleware(ApiKeyAuth, keys=_keys(api_key))]

    def generation(route: type[GenerationRoute]) -> GenerationRoute:
        return route(
            engine,
            max_body_bytes=max_body_bytes,
            keep_alive_seconds=keep_alive_seconds,
            allow_priority=allow_priority,
        )

    routes = [
        Route(
            "/v1/chat/completions",
            generation(ChatCompletions),
            methods=["POST"],
            middleware=guard,
        ),
        Route("/v1/completions", generation(Completions), methods=["POST"], middleware=guard),
        Route("/v1/models", status.models, middleware=guard),
        Route("/v1/models/{model:path}", status.model, middleware=guard),
        Route("/v1/load_lora_adapter", adapters.load, methods=["POST"], middleware=guard),
        Route("/v1/unload_lora_adapter", adapters.unload, methods=["POST"], middleware=guard),
        Route("/load", status.load, middleware=guard),
        Route("/version", status.version, middleware=guard),
        Route("/health", status.health),
        Route("/ready", status.ready),
    ]
    if metrics:
        # A plain route, not prometheus_client's app in a mount, which answers 307 first.
        routes.append(Route("/metrics", status.metrics, middleware=guard))
    app = Starlette(
        routes=routes,
        # The watch is outermost: it sees the disconnect whatever the rest is doing, and swallows
        # the `ClientDisconnected` that comes of it.
        middleware=[Middleware(DisconnectWatch, cancel=_is_ours), Middleware(RequestIdEcho)],
        exception_handlers={
            HTTPException: http_exception_response,
            Exception: unexpected_error_response,
        },
    )
    app.router.redirect_slashes = False
    return app


def _is_ours(scope: Scope) -> bool:
    """Whether a disconnect may cancel the whole request: those that generate, and only they are
    worth a watcher from the start."""
    return bool(scope["type"] == "http" and scope["method"] == "POST")


def _keys(api_key: str | Sequence[str]) -> list[str]:
    keys = [api_key] if isinstance(api_key, str) else list(api_key)
    if not keys or not all(keys):
        raise ValueError("api_key must not be empty")
    return keys
