"""The Starlette host with a larger batch, and a count of all that a storm could leave behind."""

from __future__ import annotations

import gc
import re
import threading
from collections import Counter
from typing import TYPE_CHECKING, Any

import anyio
import psutil
from starlette.requests import Request
from starlette.responses import JSONResponse

from qwen3_asgi import EngineConfig
from qwen3_asgi.testing import fake_engine
from tests.hosts.apps.stage import Stage
from tests.hosts.apps.starlette_host import build

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

    from qwen3_asgi.engine.engine import Engine

MAX_BATCH = 32


class Census:
    """Around a host app: how many requests have entered and are live, and `/census/…` on top."""

    def __init__(self, app: ASGIApp, engine: Engine) -> None:
        self._app = app
        self._engine = engine
        self._entered = self._live = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            if scope["type"] == "http" and scope["path"].startswith("/census/"):
                path = Request(scope).url.path
                state = self.everything() if path == "/census/everything" else self.requests()
                await JSONResponse(state)(scope, receive, send)
                return
            await self._app(scope, receive, send)
            return
        self._entered += 1
        self._live += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._live -= 1

    def requests(self) -> dict[str, int]:
        return {"entered": self._entered, "live": self._live}

    def everything(self) -> dict[str, Any]:
        """Call it when the engine is idle: the scheduler's bookkeeping is compared, too."""
        runtime = self._engine._lifecycle.runtime
        if runtime is not None:
            runtime.scheduler.check_integrity()
        gc.collect()
        return {
            **self.requests(),
            "tasks": len(anyio.get_running_tasks()),
            "threads": Counter(re.sub(r"\d+", "n", t.name) for t in threading.enumerate()),
            "descriptors": psutil.Process().num_fds(),
            "objects": Counter(
                f"{kind.__module__}.{kind.__qualname__}"
                for kind in map(type, gc.get_objects())
                if kind.__module__ != "builtins"
            ),
        }


def make() -> ASGIApp:
    stage = Stage()
    stage.engine = fake_engine(
        stage.executor, EngineConfig(max_batch=MAX_BATCH, max_prefill_tokens=512)
    )
    return Census(stage.controlled(build(stage)), stage.engine)
