"""The same promise without a server, on both event loops, over `DisconnectingASGITransport`.

A few milliseconds each, so this is also how an app's own tests can be written. Django is missing:
its settings are global to the process.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread
import httpx
import pytest
from prometheus_client import CollectorRegistry

from qwen3_asgi.testing import DisconnectingASGITransport, assert_idle
from tests.hosts.apps import fastapi_host, nested_host, starlette_host
from tests.hosts.apps.stage import Stage
from tests.hosts.server import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from starlette.types import ASGIApp

pytestmark = pytest.mark.anyio

BUILDERS: dict[str, tuple[Callable[[Stage], ASGIApp], str]] = {
    "starlette": (starlette_host.build, "/llm"),
    "starlette, no middleware of ours": (partial(starlette_host.build, watched=False), "/llm"),
    "two mounts deep": (nested_host.build, "/tools/llm"),
    "fastapi": (fastapi_host.build, "/llm"),
}
OWN = ["/generate", "/sync", "/stream"]
LONG = {"prompt": "a long story " * 50, "max_tokens": 2000}


@pytest.fixture
def stage() -> Iterator[Stage]:
    stage = Stage(CollectorRegistry())
    with stage.engine:
        yield stage
        stage.release()


@pytest.mark.parametrize("host", BUILDERS)
@pytest.mark.parametrize("streams", [True, False], ids=["streaming", "not streaming"])
async def test_the_mounted_app_drops_a_gone_client(stage: Stage, host: str, streams: bool) -> None:
    build, mount = BUILDERS[host]
    body = {**LONG, "model": "fake", "stream": streams}
    await hang_up(stage, build(stage), f"{mount}/v1/completions", body, read=streams)


@pytest.mark.parametrize("host", ["starlette", "fastapi"])
@pytest.mark.parametrize("path", OWN)
async def test_the_hosts_own_endpoint_drops_a_gone_client(
    stage: Stage, host: str, path: str
) -> None:
    await hang_up(stage, BUILDERS[host][0](stage), path, LONG, read=path == "/stream")
    assert sum(stage.endings.values()) == 1
    assert not stage.endings["finished"]


async def hang_up(
    stage: Stage, app: ASGIApp, path: str, body: dict[str, object], *, read: bool
) -> None:
    """Leave while a step is held; not one more may begin. `read`: only after the first event."""

    async def request() -> None:
        if not read:
            await client.post(path, json=body)
            return
        async with client.stream("POST", path, json=body) as response:
            async for chunk in response.aiter_text():
                if "data: " in chunk:
                    reading.set()

    reading = anyio.Event()
    transport = DisconnectingASGITransport(app)
    # Older GZip middleware holds a compressed stream back to its end.
    headers = {"accept-encoding": "identity"}
    async with (
        httpx.AsyncClient(
            transport=transport, base_url="http://test", timeout=60, headers=headers
        ) as client,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(request)
        if read:
            await reading.wait()
        held = await anyio.to_thread.run_sync(stage.hold)
        assert stage.engine.load().num_running == 1
        tasks.cancel_scope.cancel()
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(wait_until, lambda: disconnects(stage), "it is noticed")
            stage.release()
            await anyio.to_thread.run_sync(assert_idle, stage.engine)
    assert stage.executor.plans == held


def disconnects(stage: Stage) -> float:
    return sum(
        sample.value
        for family in stage.registry.collect()
        for sample in family.samples
        if sample.name == "qwen3_asgi_client_disconnects_total"
    )
