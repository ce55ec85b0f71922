"""What a handler may do when its client has gone: clean up, shielded or not, and generate."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread
import pytest

from qwen3_asgi import ClientDisconnected
from tests.asgi.staged import served, watched
from tests.asgi.wire import DISCONNECT, EMPTY, Wire
from tests.engine.engines import GUARD_SECONDS, LONG, quiet, tokens

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from qwen3_asgi.asgi.watch import CancelPolicy
    from tests.asgi.staged import Stage

pytestmark = pytest.mark.anyio

POLICIES = ["generations", "request"]


@pytest.mark.parametrize("cancel", POLICIES)
async def test_a_shielded_cleanup_runs_to_its_end(stage: Stage, cancel: CancelPolicy) -> None:
    wire = Wire(EMPTY)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await stage.engine.generate(prompt="hello", params=LONG)
        finally:
            with anyio.CancelScope(shield=True):
                cleaning.set()
                await go_on.wait()
                stage.notes.append("closed")

    cleaning, go_on = anyio.Event(), anyio.Event()
    async with served(watched(app, cancel), wire):
        await stage.gate.held(1)
        wire.put(DISCONNECT)
        await cleaning.wait()
        await quiet()
        assert stage.notes == []
        assert wire.sent == [], "the request is not over before its handler is"
        go_on.set()
    assert stage.notes == ["closed"]
    assert wire.sent[0]["status"] == 499
    await stage.gone()


@pytest.mark.parametrize("cancel", POLICIES)
async def test_asyncios_shield_protects_what_it_is_around(
    stage: Stage, cancel: CancelPolicy, anyio_backend_name: str
) -> None:
    if anyio_backend_name != "asyncio":
        pytest.skip("asyncio's own")
    wire = Wire(EMPTY)

    async def close() -> None:
        await go_on.wait()
        stage.notes.append("closed")

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        closing = None
        try:
            await stage.engine.generate(prompt="hello", params=LONG)
        finally:
            closing = asyncio.ensure_future(close())
            closings.append(closing)
            await asyncio.shield(closing)

    closings: list[asyncio.Future[None]] = []
    go_on = anyio.Event()
    async with served(watched(app, cancel), wire):
        await stage.gate.held(1)
        wire.put(DISCONNECT)
        while not closings:
            await quiet()
        go_on.set()
    await closings[0]
    assert stage.notes == ["closed"]
    await stage.gone()


@pytest.mark.parametrize("cancel", POLICIES)
async def test_a_generation_shielded_from_the_handler_ends_with_the_client(
    stage: Stage, cancel: CancelPolicy, anyio_backend_name: str
) -> None:
    """A shield keeps cancellation away from a task; the client that has gone is another matter."""
    if anyio_backend_name != "asyncio":
        pytest.skip("asyncio's own")
    wire = Wire(EMPTY)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        generations.append(asyncio.ensure_future(stage.generate()))
        await asyncio.shield(generations[0])

    generations: list[asyncio.Future[None]] = []
    async with served(watched(app, cancel), wire):
        await stage.gate.held(1)
        wire.put(DISCONNECT)
    assert isinstance((await asyncio.gather(*generations, return_exceptions=True))[0], Exception)
    assert isinstance(stage.notes[0], ClientDisconnected)
    await stage.gone()


@pytest.mark.parametrize("cancel", POLICIES)
async def test_a_last_generation_in_the_cleanup_is_refused_at_once(
    stage: Stage, cancel: CancelPolicy
) -> None:
    wire = Wire(EMPTY)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await stage.engine.generate(prompt="hello", params=LONG)
        finally:
            with anyio.CancelScope(shield=True), pytest.raises(ClientDisconnected):
                await stage.engine.generate(prompt="say goodbye", params=tokens(5))
            stage.notes.append("refused")

    async with served(watched(app, cancel), wire):
        await stage.gate.held(1)
        wire.put(DISCONNECT)
    assert stage.notes == ["refused"]
    await stage.gone()


@pytest.mark.parametrize("cancel", POLICIES)
async def test_a_generation_in_a_context_of_its_own_is_nobodys_request(
    stage: Stage, cancel: CancelPolicy
) -> None:
    """The way out for those who mean it: a last summary for the log, say."""
    wire = Wire(EMPTY)

    def say_goodbye() -> int:
        output = stage.engine.generate_sync(prompt="say goodbye", params=tokens(5))
        return len(output.token_ids)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await stage.engine.generate(prompt="hello", params=LONG)
        finally:
            stage.gate.open()
            with anyio.CancelScope(shield=True):
                said = await anyio.to_thread.run_sync(contextvars.Context().run, say_goodbye)
            stage.notes.append(said)

    async with served(watched(app, cancel), wire):
        await stage.gate.held(1)
        wire.put(DISCONNECT)
    assert stage.notes == [5]


@pytest.mark.parametrize("client_stays", [True, False])
async def test_a_generation_in_the_cleanup_of_a_cancelled_handler(
    stage: Stage, client_stays: bool
) -> None:
    """The host has cancelled it (a timeout, its shutdown): only a client that leaves ends that."""
    wire = Wire(EMPTY)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        with anyio.CancelScope() as handler:
            scopes.append(handler)
            try:
                await stage.engine.generate(prompt="hello", params=LONG)
            finally:
                with anyio.CancelScope(shield=True):
                    await finish()

    async def finish() -> None:
        cleaning.set()
        if client_stays:
            output = await stage.engine.generate(prompt="say goodbye", params=tokens(5))
            stage.notes.append(len(output.token_ids))
        else:
            with pytest.raises(ClientDisconnected):
                await stage.engine.generate(prompt="say goodbye", params=LONG)
            stage.notes.append("told")

    scopes: list[anyio.CancelScope] = []
    cleaning = anyio.Event()
    async with served(watched(app), wire):
        await stage.gate.held(1)
        scopes[0].cancel()
        await cleaning.wait()
        stage.gate.allow(1)
        await stage.gate.held(2)
        if client_stays:
            stage.gate.open()
        else:
            wire.put(DISCONNECT)
    assert stage.notes == ([5] if client_stays else ["told"])
    if not client_stays:
        await stage.gone(steps=2)


@pytest.mark.parametrize("cancel", POLICIES)
async def test_a_thread_is_told_but_not_torn_away(stage: Stage, cancel: CancelPolicy) -> None:
    """The cancelled task waits for its thread, which cleans up like any handler."""
    wire = Wire(EMPTY)

    def work() -> None:
        try:
            stage.engine.generate_sync(prompt="hello", params=LONG)
        except ClientDisconnected:
            stage.notes.append("told")
            raise
        finally:
            cleaning.set()
            go_on.wait(GUARD_SECONDS)
            stage.notes.append("closed")

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await anyio.to_thread.run_sync(work)

    cleaning, go_on = threading.Event(), threading.Event()
    async with served(watched(app, cancel), wire):
        await stage.gate.held(1)
        wire.put(DISCONNECT)
        await anyio.to_thread.run_sync(cleaning.wait, GUARD_SECONDS)
        assert stage.notes == ["told"]
        assert wire.sent == []
        go_on.set()
    assert stage.notes == ["told", "closed"]
    assert wire.sent[0]["status"] == 499
    await stage.gone()
