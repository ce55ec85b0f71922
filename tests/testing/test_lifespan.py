"""`lifespan(app)` does what a server does before the first and after the last request."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import anyio
import pytest
from starlette.applications import Starlette

from qwen3_asgi.testing import fake_engine, lifespan

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from starlette.types import ASGIApp, Receive, Scope, Send

pytestmark = pytest.mark.anyio


async def test_it_starts_and_stops_the_engine_of_an_app() -> None:
    engine = fake_engine()
    async with lifespan(Starlette(lifespan=engine.lifespan)):
        assert engine.state == "ready"
    assert engine.state == "stopped"


async def test_it_yields_the_state_and_runs_in_one_task() -> None:
    """Task groups of a lifespan must be left in the task that has entered them."""
    notes = []

    @asynccontextmanager
    async def own(app: object) -> AsyncIterator[dict[str, Any]]:
        async with anyio.create_task_group() as group:
            group.start_soon(anyio.sleep_forever)
            yield {"db": "open"}
            group.cancel_scope.cancel()
        notes.append("closed")

    async with lifespan(Starlette(lifespan=own)) as state:
        assert state == {"db": "open"}
        assert notes == []
    assert notes == ["closed"]


async def enter(app: ASGIApp, error: Exception | None = None) -> None:
    with anyio.fail_after(10):
        async with lifespan(app):
            if error is not None:
                raise error


async def test_errors_come_out_bare() -> None:
    error = LookupError("of the test")
    with pytest.raises(LookupError) as caught:
        await enter(Starlette(), error)
    assert caught.value is error


async def test_a_failed_startup_is_an_error() -> None:
    @asynccontextmanager
    async def broken(app: object) -> AsyncIterator[None]:
        raise ConnectionError("no database")
        yield

    async def silent(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()

    async def refuses(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "lifespan.startup.failed", "message": "no database"})

    async def knows_none(scope: Scope, receive: Receive, send: Send) -> None:
        raise ValueError("only http")

    with pytest.raises(RuntimeError, match=r"(?s)startup failed: .*no database"):
        await enter(Starlette(lifespan=broken))
    with pytest.raises(RuntimeError, match="without answering"):
        await enter(silent)
    with pytest.raises(RuntimeError, match="startup failed: no database"):
        await enter(refuses)
    with pytest.raises(ValueError, match="only http"):
        await enter(knows_none)


async def test_a_failed_shutdown_is_an_error() -> None:
    @asynccontextmanager
    async def broken(app: object) -> AsyncIterator[None]:
        yield
        raise ConnectionError("lost")

    with pytest.raises(RuntimeError, match=r"(?s)shutdown failed: .*lost"):
        await enter(Starlette(lifespan=broken))


async def test_a_cancelled_test_still_shuts_the_app_down() -> None:
    notes = []

    @asynccontextmanager
    async def own(app: object) -> AsyncIterator[None]:
        yield
        await anyio.lowlevel.checkpoint()
        notes.append("closed")

    with anyio.CancelScope() as scope:
        async with lifespan(Starlette(lifespan=own)):
            scope.cancel()
            await anyio.sleep_forever()
    assert notes == ["closed"]


async def test_an_app_that_does_not_start_up_can_be_given_up() -> None:
    async def hangs(scope: Scope, receive: Receive, send: Send) -> None:
        await anyio.sleep_forever()

    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as group:
            group.start_soon(enter, hangs)
            await anyio.lowlevel.checkpoint()
            scope.cancel()
    assert scope.cancelled_caught
