"""Every host framework in process: the client of one endpoint leaves, the others' stay."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.hosts.apps import (
    django_host,
    fastapi_host,
    litestar_host,
    plain_host,
    quart_host,
    starlette_host,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.types import ASGIApp

    from tests.hosts.apps.stage import Stage
    from tests.hosts.scene import Scene

pytestmark = [
    pytest.mark.anyio,
    # What trio says when a host's streaming response drops a generator in the middle.
    pytest.mark.filterwarnings("ignore:Async generator:ResourceWarning"),
]

BUILDERS: dict[str, Callable[[Stage], ASGIApp]] = {
    "starlette": starlette_host.build,
    "fastapi": fastapi_host.build,
    "django": django_host.build,
    "litestar": litestar_host.build,
    "quart": quart_host.build,
    "plain": plain_host.build,
}
ASYNCIO_ONLY = ("django", "quart")
HOSTS = [
    pytest.param(backend, host, id=f"{host}-{backend}")
    for host in BUILDERS
    for backend in ("asyncio", "trio")
    if backend == "asyncio" or host not in ASYNCIO_ONLY
]
hosts = pytest.mark.parametrize(("anyio_backend", "host"), HOSTS)


@hosts
@pytest.mark.parametrize("path", ["/generate", "/sync"])
async def test_a_client_that_leaves_before_the_answer(scene: Scene, host: str, path: str) -> None:
    await scene.leave(BUILDERS[host](scene.stage), path)
    ends = scene.told()
    # Frameworks that cancel the handlers of a gone client themselves may be first to tell.
    assert ends.keys() <= {"ClientDisconnected", "CancelledError"}
    if host not in ASYNCIO_ONLY:
        assert ends["ClientDisconnected"] == 1


@hosts
async def test_a_client_that_leaves_in_the_middle_of_a_stream(scene: Scene, host: str) -> None:
    await scene.leave(BUILDERS[host](scene.stage), "/stream", mid_stream=True)
    scene.told()


@hosts
@pytest.mark.parametrize("streams", [True, False], ids=["streaming", "not streaming"])
async def test_a_client_that_leaves_the_mounted_app(scene: Scene, host: str, streams: bool) -> None:
    await scene.leave(
        BUILDERS[host](scene.stage),
        "/llm/v1/completions",
        mid_stream=streams,
        body={"model": "fake", "stream": streams},
        stays="/llm/v1/completions",
    )
    assert not scene.stage.endings
