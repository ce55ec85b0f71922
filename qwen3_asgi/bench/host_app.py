"""The host app that is measured, as a server process: `/ping`, `/lag`, and an engine at `/llm`.

Started by `host_process`, which passes the settings as one JSON object and reads one line with the
port. `/lag` tells of a task that sleeps for a millisecond at a time, for each time since it was
last asked, how late it woke, as any other handler of this loop would have; and how much CPU time
the loop's thread had used meanwhile, which is the part of it that is not the machine's.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import anyio
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.routing import Mount, Route

from qwen3_asgi.app import create_app
from qwen3_asgi.config import EngineConfig
from qwen3_asgi.engine.engine import Engine
from qwen3_asgi.middleware import DisconnectMiddleware

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from starlette.requests import Request
    from starlette.responses import Response

ServerName = Literal["uvicorn", "hypercorn"]
SLEEP_SECONDS = 0.001
FAKE_STEP_SECONDS = 0.01


@dataclass(frozen=True, slots=True)
class HostSettings:
    """`model` "fake" runs no model: steps of 10 ms, without a computation. `switch_interval` is
    `sys.setswitchinterval` of the process; None leaves it alone. `engine` has more fields of the
    engine's configuration. Without `lag` nothing is told there, and an idle host uses no CPU."""

    model: str = "tiny"
    server: ServerName = "uvicorn"
    num_threads: int | None = None
    max_batch: int = 32
    switch_interval: float | None = None
    engine: dict[str, Any] = field(default_factory=dict)
    lag: bool = True


@contextlib.contextmanager
def host_process(settings: HostSettings) -> Iterator[str]:
    """The URL of a new host, which ends with the block.

    Raises:
        ValueError: it did not start; its own words are on stderr.
    """
    arguments = [sys.executable, "-m", __name__, json.dumps(asdict(settings))]
    with subprocess.Popen(
        arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            port = process.stdout.readline() if process.stdout else ""
            if not port:
                raise ValueError("the host did not start")
            yield f"http://127.0.0.1:{int(port)}"
        finally:
            process.kill()


class Lag:
    """How late a task wakes that sleeps a little at a time, and the CPU time used since it last
    woke; in milliseconds."""

    def __init__(self) -> None:
        self._samples: list[tuple[float, float]] = []

    async def watch(self) -> None:
        while True:
            due, cpu = time.perf_counter() + SLEEP_SECONDS, time.thread_time()
            await anyio.sleep(SLEEP_SECONDS)
            late, used = time.perf_counter() - due, time.thread_time() - cpu
            self._samples.append((late * 1000, used * 1000))

    def take(self) -> list[tuple[float, float]]:
        samples, self._samples = self._samples, []
        return samples


def build(settings: HostSettings) -> Starlette:
    """The host app. Its lifespan starts the engine."""
    engine = make_engine(settings)
    lag = Lag()

    async def ping(request: Request) -> Response:
        return PlainTextResponse("pong")

    async def late(request: Request) -> Response:
        return JSONResponse(lag.take())

    async def told(request: Request) -> Response:
        return JSONResponse({**asdict(settings), "switch_interval": sys.getswitchinterval()})

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with engine, anyio.create_task_group() as group:
            if settings.lag:
                group.start_soon(lag.watch)
            yield
            group.cancel_scope.cancel()

    return Starlette(
        routes=[
            Route("/ping", ping),
            Route("/lag", late),
            Route("/settings", told),
            Mount("/llm", create_app(engine)),
        ],
        middleware=[Middleware(DisconnectMiddleware)],
        lifespan=lifespan,
    )


def make_engine(settings: HostSettings) -> Engine:
    config = EngineConfig(
        max_batch=settings.max_batch, num_threads=settings.num_threads, **settings.engine
    )
    if settings.model != "fake":
        return Engine(settings.model, config)
    from qwen3_asgi.testing import FakeExecutor, fake_engine

    executor = FakeExecutor(num_kv_blocks=65536, block_size=16, vocab_size=512)
    executor.before_step = lambda plan: time.sleep(FAKE_STEP_SECONDS)
    return fake_engine(executor, config)


def main(argument: str) -> None:
    settings = HostSettings(**json.loads(argument))
    if settings.switch_interval is not None:
        sys.setswitchinterval(settings.switch_interval)
    app = build(settings)
    listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
    # The engine is not ready yet: who connects now waits in the backlog until it is.
    print(listener.getsockname()[1], flush=True)
    threading.Thread(target=_end_with_the_parent, daemon=True).start()
    if settings.server == "hypercorn":
        from hypercorn.asyncio import serve
        from hypercorn.config import Config

        config = Config()
        config.bind = [f"fd://{listener.fileno()}"]
        config.loglevel = "WARNING"
        asyncio.run(serve(app, config))  # type: ignore[arg-type]
        return
    import uvicorn

    uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listener])


def _end_with_the_parent() -> None:
    """Its end closes our stdin, however it ended: nobody else would stop us."""
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
