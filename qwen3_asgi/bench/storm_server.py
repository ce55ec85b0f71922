"""A server for a storm: in a thread of this process, or in a process of its own."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from qwen3_asgi.app import create_app
from qwen3_asgi.bench.host_app import HostSettings, host_process, make_engine

if TYPE_CHECKING:
    from collections.abc import Iterator

    from starlette.types import ASGIApp

    from qwen3_asgi.bench.host_app import ServerName

POLL_SECONDS = 0.001


@contextmanager
def storm_server(model: str, server: ServerName | None) -> Iterator[str]:
    """The base URL of the mounted app; `server=None` is uvicorn in this process.

    Raises:
        ValueError: it did not start.
    """
    settings = HostSettings(model, server or "uvicorn", lag=False)
    if server is None:
        with make_engine(settings) as engine, serve_here(create_app(engine)) as url:
            yield url
    else:
        with host_process(settings) as url:
            yield f"{url}/llm"


@contextmanager
def serve_here(app: ASGIApp) -> Iterator[str]:
    """The base URL of an app that uvicorn serves in a thread of this process.

    Raises:
        ValueError: it did not start.
    """
    import uvicorn

    config = uvicorn.Config(app, port=0, log_level="warning", lifespan="off", ws="none")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, name="server")
    thread.start()
    try:
        while not server.started:
            if not thread.is_alive():
                raise ValueError("the server did not start")
            time.sleep(POLL_SECONDS)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
