"""An app for servers with several processes: it says where it runs, and a file holds its steps.

Each `make…` is one way to treat the engine before the workers are forked.
"""

from __future__ import annotations

import os
import time
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Mount, Route

from qwen3_asgi import Engine, create_app
from qwen3_asgi.testing import FakeExecutor, fake_engine

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    from qwen3_asgi.scheduler.plan import StepPlan

HOLD_FILE = "WORKER_HOST_HOLD"


def wait_while_held(plan: StepPlan) -> None:
    del plan
    path = os.environ.get(HOLD_FILE)
    while path is not None and Path(path).exists():
        time.sleep(0.005)


def engine_of_files() -> Engine:
    executor = FakeExecutor(num_kv_blocks=4096, block_size=16, vocab_size=512)
    executor.before_step = wait_while_held
    return fake_engine(executor)


def build(engine: Engine, *, lifespan: bool, version: str = "1") -> Starlette:
    async def where(request: Request) -> Response:
        load = engine.load()
        return JSONResponse(
            {
                "pid": os.getpid(),
                "state": engine.state,
                "live": load.num_running + load.num_waiting,
                "version": version,
            }
        )

    return Starlette(
        routes=[Route("/where", where), Mount("/llm", create_app(engine))],
        lifespan=engine.lifespan if lifespan else (lambda app: nullcontext()),
    )


def make() -> Starlette:
    """Constructed, started by the lifespan."""
    return build(engine_of_files(), lifespan=True)


def make_lazy() -> Starlette:
    """Constructed, started by the first use."""
    return build(engine_of_files(), lifespan=False)


def make_started() -> Starlette:
    """Started already when the app is imported."""
    engine = engine_of_files()
    engine.start_sync()
    return build(engine, lifespan=False)


def make_started_with_lifespan() -> Starlette:
    engine = engine_of_files()
    engine.start_sync()
    return build(engine, lifespan=True)
