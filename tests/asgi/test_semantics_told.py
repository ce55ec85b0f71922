"""`ClientDisconnected` reaches whoever waits for a generation, in whatever way they wait."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest

from qwen3_asgi import ClientDisconnected
from tests.asgi.staged import answer, served, watched
from tests.asgi.wire import DISCONNECT, EMPTY, END, START, Wire
from tests.engine.engines import LONG, quiet, tokens

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from starlette.types import Receive, Scope, Send

    from qwen3_asgi.asgi.watch import CancelPolicy
    from tests.asgi.staged import Stage

pytestmark = pytest.mark.anyio


async def leave(stage: Stage, handler: Callable[[], Awaitable[object]], live: int = 1) -> Wire:
    """Run a handler in a watched request until its generations are live, then hang up."""
    wire = Wire(EMPTY)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await handler()
        await answer(send)

    async with served(watched(app), wire):
        await stage.gate.held(1)
        await stage.live(live)
        wire.put(DISCONNECT)
    await stage.gone()
    return wire


async def test_a_task_that_reads_a_handle_is_told_and_told_again(stage: Stage) -> None:
    async def handler() -> None:
        handle = await stage.engine.submit(prompt="hello", params=LONG)
        for _ in range(2):
            with pytest.raises(ClientDisconnected):
                await anext(handle)
        stage.notes.append("told twice")

    await leave(stage, handler)
    assert stage.notes == ["told twice"]


async def test_a_thread_that_reads_a_handle_is_told(stage: Stage) -> None:
    def work() -> None:
        handle = stage.engine.submit_sync(prompt="hello", params=LONG)
        with pytest.raises(ClientDisconnected):
            list(handle.read_sync())
        stage.notes.append("told")

    await leave(stage, lambda: anyio.to_thread.run_sync(work))
    assert stage.notes == ["told"]


async def test_a_handler_that_goes_on_answers_as_it_likes(stage: Stage) -> None:
    """The server swallows it, but the host's own middleware sees the status that was meant."""

    async def handler() -> None:
        with pytest.raises(ClientDisconnected):
            await stage.engine.generate(prompt="hello", params=LONG)

    wire = await leave(stage, handler)
    assert [message.get("status") for message in wire.sent] == [200, None]


async def test_every_call_of_gather_is_told(stage: Stage, anyio_backend_name: str) -> None:
    if anyio_backend_name != "asyncio":
        pytest.skip("asyncio's own")

    async def handler() -> None:
        endings = await asyncio.gather(
            *[stage.generate() for _ in range(3)], return_exceptions=True
        )
        assert [type(ending) for ending in endings] == [ClientDisconnected] * 3
        stage.notes.append("gathered")

    await leave(stage, handler, live=3)
    assert stage.notes[-1] == "gathered"
    assert stage.notes.count("cleaned up") == 3


async def test_gather_raises_the_first_one_and_that_is_swallowed(
    stage: Stage, anyio_backend_name: str
) -> None:
    if anyio_backend_name != "asyncio":
        pytest.skip("asyncio's own")
    others = []

    async def handler() -> None:
        tasks = [asyncio.ensure_future(stage.generate()) for _ in range(3)]
        others.extend(tasks)
        await asyncio.gather(*tasks)

    wire = await leave(stage, handler, live=3)
    assert wire.sent[0]["status"] == 499
    endings = await asyncio.gather(*others, return_exceptions=True)
    assert [type(ending) for ending in endings] == [ClientDisconnected] * 3


async def test_asyncios_task_group_is_told_and_swallowed(
    stage: Stage, anyio_backend_name: str
) -> None:
    if anyio_backend_name != "asyncio":
        pytest.skip("asyncio's own")

    async def handler() -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(3):
                group.create_task(stage.generate())

    wire = await leave(stage, handler, live=3)
    assert stage.notes.count("cleaned up") == 3
    assert wire.sent[0]["status"] == 499


async def test_groups_within_groups_are_swallowed_and_can_be_caught_by_type(stage: Stage) -> None:
    async def branch() -> None:
        async with anyio.create_task_group() as group:
            for _ in range(2):
                group.start_soon(stage.generate)

    async def handler() -> None:
        try:
            async with anyio.create_task_group() as group:
                for _ in range(2):
                    group.start_soon(branch)
        except* ClientDisconnected as told:
            stage.notes.append(sorted(type(error).__name__ for error in told.exceptions))
            raise

    wire = await leave(stage, handler, live=4)
    assert stage.notes[-1] == ["ExceptionGroup", "ExceptionGroup"]
    assert wire.sent[0]["status"] == 499


async def test_tasks_that_do_not_generate_run_on_beside_those_that_do(stage: Stage) -> None:
    """In the same request and the same group: the handler decides what ends with what."""

    async def generate() -> None:
        with pytest.raises(ClientDisconnected):
            await stage.engine.generate(prompt="hello", params=LONG)
        told.set()

    async def bookkeeping() -> None:
        await told.wait()
        await anyio.lowlevel.checkpoint()
        stage.notes.append("booked")

    async def handler() -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(generate)
            group.start_soon(bookkeeping)

    told = anyio.Event()
    await leave(stage, handler)
    assert stage.notes == ["booked"]


@pytest.mark.parametrize("cancel", ["generations", "request"])
@pytest.mark.parametrize("kind", ["anyio", "asyncio"])
async def test_a_timeout_ends_the_generation_and_not_the_request(
    stage: Stage, kind: str, cancel: CancelPolicy, anyio_backend_name: str
) -> None:
    if kind != "anyio" and anyio_backend_name != "asyncio":
        pytest.skip("asyncio's own")
    wire = Wire(EMPTY)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        with pytest.raises(TimeoutError):
            await timed_out()
        expired.set()
        output = await stage.engine.generate(prompt="shorter", params=tokens(2))
        stage.notes.append(len(output.token_ids))
        await answer(send)

    async def timed_out() -> None:
        if kind == "anyio":
            with anyio.fail_after(None) as scope:
                expire.append(lambda: setattr(scope, "deadline", anyio.current_time()))
                await stage.engine.generate(prompt="hello", params=LONG)
        else:
            async with asyncio.timeout(None) as timeout:
                expire.append(lambda: timeout.reschedule(asyncio.get_running_loop().time()))
                await stage.engine.generate(prompt="hello", params=LONG)

    expire: list[Callable[[], None]] = []
    expired = anyio.Event()
    async with served(watched(app, cancel), wire):
        await stage.gate.held(1)
        expire.pop()()
        await expired.wait()
        stage.gate.open()
    assert stage.notes == [2]
    assert wire.sent[0]["status"] == 200
    first = stage.fake.rows[0].request_id
    assert len(stage.fake.rows_of(first)) == 1, "the step that was running was its last"


async def test_after_a_timeout_the_request_is_watched_on(stage: Stage) -> None:
    wire = Wire(EMPTY)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        with anyio.CancelScope() as first:
            scopes.append(first)
            await stage.engine.generate(prompt="hello", params=LONG)
        timed_out.set()
        await stage.generate()

    scopes: list[anyio.CancelScope] = []
    timed_out = anyio.Event()
    async with served(watched(app), wire):
        await stage.gate.held(1)
        scopes[0].cancel()
        await timed_out.wait()
        stage.gate.allow(1)
        await stage.gate.held(2)
        wire.put(DISCONNECT)
    assert isinstance(stage.notes[0], ClientDisconnected)
    await stage.gone(steps=2)


@pytest.mark.parametrize("answered", [False, True])
async def test_a_task_that_nobody_waits_for_is_bound_until_the_answer_is_complete(
    stage: Stage, answered: bool
) -> None:
    wire = Wire(EMPTY)

    async def generate() -> None:
        try:
            output = await stage.engine.generate(prompt="hello", params=tokens(10))
            stage.notes.append(len(output.token_ids))
        except ClientDisconnected:
            stage.notes.append("told")

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        host.start_soon(generate)
        await stage.live(1)
        await send(START)
        if answered:
            await send(END)
        wire.put(DISCONNECT)
        await quiet()
        stage.gate.open()

    async with anyio.create_task_group() as host, served(watched(app), wire):
        pass
    assert stage.notes == ([10] if answered else ["told"])
