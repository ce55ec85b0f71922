"""A `RequestHandle`: who may read it, who may cancel it, and what both sides then see."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread
import pytest

from qwen3_asgi.errors import GenerationCancelled
from tests.engine.engines import (
    GUARD_SECONDS,
    LONG,
    Gate,
    executor,
    expected,
    quiet,
    running,
    settle,
    tokens,
    toy_engine,
)

if TYPE_CHECKING:
    from qwen3_asgi.engine.handle import RequestHandle

pytestmark = pytest.mark.anyio


async def test_cancelling_from_eight_threads_ends_it_once() -> None:
    fake = executor()
    gate = Gate(fake)
    async with running(toy_engine(fake), gate) as engine:
        handle = await engine.submit(prompt="hello", params=LONG)
        await gate.held(1)
        barrier = threading.Barrier(8)

        def cancel(_: int) -> None:
            barrier.wait(GUARD_SECONDS)
            for _ in range(100):
                handle.cancel()

        with ThreadPoolExecutor(8) as pool:
            await anyio.to_thread.run_sync(lambda: list(pool.map(cancel, range(8))))
        gate.open()
        with pytest.raises(GenerationCancelled):
            [batch async for batch in handle]
        await settle(engine)
        assert fake.dropped == [handle.request_id]
        assert len((await engine.generate(prompt="hello", params=tokens(2))).token_ids) == 2


async def test_a_cancelled_handle_says_so_however_often_it_is_read() -> None:
    async with running(toy_engine()) as engine:
        handle = await engine.submit(prompt="hello", params=LONG)
        handle.cancel()
        for _ in range(3):
            with anyio.fail_after(GUARD_SECONDS), pytest.raises(GenerationCancelled):
                async for _ in handle:
                    pass


async def test_a_handle_is_read_on_its_own_loop_only() -> None:
    async with running(toy_engine()) as engine:
        handle = await engine.submit(prompt="hello", params=tokens(3))

        async def read() -> None:
            await anext(handle)

        for backend in ("asyncio", "trio"):
            run = partial(anyio.run, read, backend=backend)
            with pytest.raises(RuntimeError, match="event loop that submitted it"):
                await anyio.to_thread.run_sync(run)
        with pytest.raises(RuntimeError, match="belongs to an event loop"):
            next(handle.read_sync())
        assert len([token async for batch in handle for token in batch.tokens]) == 3


async def test_a_second_reader_is_told_instead_of_waiting_forever() -> None:
    fake = executor()
    gate = Gate(fake)
    async with running(toy_engine(fake), gate) as engine:
        handle = await engine.submit(prompt="hello", params=tokens(3))
        received: list[int] = []

        async def read() -> None:
            received.extend([t.token_id async for batch in handle for t in batch.tokens])

        async with anyio.create_task_group() as group:
            group.start_soon(read)
            await quiet()
            with pytest.raises(RuntimeError, match="another task"):
                await anext(handle)
            gate.open()
        assert received == expected(handle.prompt_token_ids, 3)


async def test_a_reader_that_was_cancelled_may_read_on_without_loss() -> None:
    fake = executor()
    gate = Gate(fake)
    async with running(toy_engine(fake), gate) as engine:
        handle = await engine.submit(prompt="hello", params=tokens(6))
        received: list[int] = []
        for step in range(1, 6):
            with anyio.move_on_after(0):
                await anext(handle)
            await gate.held(step)
            gate.allow(1)
            received.extend(token.token_id for token in (await anext(handle)).tokens)
        gate.open()
        received.extend([t.token_id async for batch in handle for t in batch.tokens])
        assert received == expected(handle.prompt_token_ids, 6)


async def test_the_synchronous_methods_refuse_an_event_loop() -> None:
    async with running(toy_engine()) as engine:
        for method in (engine.submit_sync, engine.generate_sync):
            with pytest.raises(RuntimeError, match="would block the event loop"):
                method(prompt="hello")
        assert engine.state == "new"


async def test_threads_generate_side_by_side() -> None:
    async with running(toy_engine()) as engine:

        def generate(i: int) -> bool:
            output = engine.generate_sync(prompt_token_ids=[i + 1, 2, 3], params=tokens(30))
            return list(output.token_ids) == expected([i + 1, 2, 3], 30)

        with ThreadPoolExecutor(8) as pool:
            results = await anyio.to_thread.run_sync(lambda: list(pool.map(generate, range(32))))
        assert all(results)
        await settle(engine)


async def test_a_thread_reads_and_cancels_its_own_handle() -> None:
    fake = executor()
    async with running(toy_engine(fake)) as engine:

        def use() -> RequestHandle:
            handle = engine.submit_sync(prompt="hello", params=LONG)
            reader = handle.read_sync()
            assert next(reader).tokens
            handle.cancel()
            with pytest.raises(GenerationCancelled):
                for _ in reader:
                    pass
            with pytest.raises(GenerationCancelled):
                next(handle.read_sync())
            return handle

        handle = await anyio.to_thread.run_sync(use)
        await settle(engine)
        assert fake.dropped == [handle.request_id]
        with pytest.raises(RuntimeError, match="event loop that submitted it"):
            await anext(handle)
