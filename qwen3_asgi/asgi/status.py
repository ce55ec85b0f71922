"""The routes that tell about the server: models, health, readiness, load, metrics, version."""

from __future__ import annotations

import contextlib
from dataclasses import asdict
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from starlette.responses import Response

import qwen3_asgi
from qwen3_asgi.asgi.errors import error_response
from qwen3_asgi.asgi.responses import encode_json
from qwen3_asgi.errors import EngineDead, EngineNotReady, InvalidRequest
from qwen3_asgi.metrics import render
from qwen3_asgi.openai.requests import choose_adapter

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from starlette.requests import Request

    from qwen3_asgi.asgi.serving import ServingEngine
    from qwen3_asgi.engine.adapters import AdapterInfo


class StatusRoutes:
    """Endpoints that only read; `ready` alone also starts an engine that was left to first use."""

    def __init__(self, engine: ServingEngine, registry: CollectorRegistry, created: int) -> None:
        self._engine = engine
        self._registry = registry
        self._created = created

    async def models(self, request: Request) -> Response:
        name, created = self._engine.model_name, self._created
        adapters = [adapter_entry(info, name, created) for info in self._engine.adapters()]
        return _json({"object": "list", "data": [_entry(name, created), *adapters]})

    async def model(self, request: Request) -> Response:
        adapters = {info.name: info for info in self._engine.adapters()}
        name = self._engine.model_name
        try:
            chosen = choose_adapter(request.path_params["model"], name, adapters)
        except InvalidRequest as error:
            return error_response(error)
        if chosen is None:
            return _json(_entry(name, self._created))
        return _json(adapter_entry(adapters[chosen], name, self._created))

    async def health(self, request: Request) -> Response:
        """Alive: an engine not started yet is healthy, a dead one has to be replaced.

        A stalled one is told of, but may well come back: on a CPU a step can take its time.
        """
        refusal = self._engine.refusal()
        if isinstance(refusal, EngineDead):
            return error_response(refusal)
        stalled = self._engine.stalled_seconds
        if stalled is not None:
            detail = f"a step has been running for {stalled:.0f} s"
            return _json({"status": "stalled", "detail": detail})
        return _json({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        """Whether a generation sent now would be taken at once.

        Traffic often waits for this probe, so a lazy engine would never get its first request.
        """
        if self._engine.state == "new":
            with contextlib.suppress(EngineNotReady, EngineDead):  # it has changed since
                self._engine.start_soon()
        refusal = self._engine.refusal()
        return _json({"status": "ready"}) if refusal is None else error_response(refusal)

    async def load(self, request: Request) -> Response:
        load = self._engine.load()
        return _json({**asdict(load), "kv_usage": load.kv_usage})

    async def metrics(self, request: Request) -> Response:
        # Collectors may read files (multiprocess mode) or take their time: off the loop. Not in the
        # default threads: the host's blocking endpoints may hold them all, just when it matters.
        body, content_type = await self._engine.offload(
            render, self._registry, request.headers.get("accept")
        )
        return Response(body, headers={"content-type": content_type})

    async def version(self, request: Request) -> Response:
        return _json({"version": qwen3_asgi.__version__})


def adapter_entry(info: AdapterInfo, base: str, created: int) -> dict[str, Any]:
    """An adapter in the list of models. Of its path only the end is told."""
    return {**_entry(info.name, created), "parent": base, "root": PurePath(info.path).name}


def _entry(name: str, created: int) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": created, "owned_by": "qwen3-asgi"}


def _json(payload: Any) -> Response:
    return Response(encode_json(payload), media_type="application/json")
