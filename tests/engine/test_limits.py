"""Deadlines, priorities and the bounds of the queue, as `Engine.submit` offers them."""

from __future__ import annotations

import math
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import anyio
import anyio.to_thread
import pytest
from prometheus_client import CollectorRegistry

from qwen3_asgi.config import EngineConfig
from qwen3_asgi.engine.delivery import Delivery
from qwen3_asgi.engine.engine import Engine
from qwen3_asgi.engine.mailbox import Mailbox
from qwen3_asgi.engine.outbox import ThreadOutbox
from qwen3_asgi.errors import EngineOverloaded, GenerationTimeout, InvalidRequest
from qwen3_asgi.scheduler.plan import RequestId
from tests.engine.engines import (
    GUARD_SECONDS,
    LONG,
    Gate,
    executor,
    expected,
    running,
    settle,
    tokens,
    toy_engine,
)
from tests.engine.loader import Door, Loader

if TYPE_CHECKING:
    from collections.abc import Callable

    from qwen3_asgi.engine.handle import RequestHandle

pytestmark = pytest.mark.anyio

AT_ONCE = 1e-9  # a deadline that has passed whenever somebody looks


def timeouts(registry: CollectorRegistry) -> float:
    """What the one engine in this registry has counted."""
    families = {family.name: family for family in registry.collect()}
    counted = families["qwen3_asgi_request_timeouts"].samples
    return next(sample.value for sample in counted if sample.name.endswith("_total"))


def later(engine: Engine, seconds: float) -> None:
    """Put the scheduler's clock forward."""
    engine._running().scheduler._sweeper._clock = lambda: time.monotonic() + seconds


async def read(handle: RequestHandle) -> list[int]:
    return [token.token_id async for batch in handle for token in batch.tokens]


# ---- deadlines ----


async def test_a_request_ends_at_its_deadline_and_the_others_go_on() -> None:
    fake = executor()
    gate = Gate(fake)
    registry = CollectorRegistry()
    async with running(toy_engine(fake), gate) as engine:
        engine.metrics(registry)
        late = await engine.submit(prompt="hello", params=LONG, timeout=100)
        patient = await engine.submit(prompt_token_ids=[1, 2, 3], params=tokens(9), timeout=900)
        other = await engine.submit(prompt_token_ids=[1, 2, 4], params=tokens(9))
        gate.allow(2)
        await gate.held(3)
        later(engine, 200)
        gate.open()
        with anyio.fail_after(GUARD_SECONDS), pytest.raises(GenerationTimeout):
            await read(late)
        assert await read(patient) == expected([1, 2, 3], 9)
        assert await read(other) == expected([1, 2, 4], 9)
        assert timeouts(registry) == 1
        with pytest.raises(GenerationTimeout):
            await anext(late)
        await settle(engine)
        assert len([row for row in fake.rows if row.request_id == late.request_id]) == 3


@pytest.mark.parametrize(
    ("max_timeout", "asked", "ends"),
    [(100, None, True), (100, 900, True), (900, 100, True), (900, None, False), (900, 800, False)],
)
async def test_the_engine_bounds_the_deadlines(
    max_timeout: float, asked: float | None, ends: bool
) -> None:
    fake = executor()
    gate = Gate(fake)
    config = EngineConfig(max_timeout=max_timeout)
    async with running(toy_engine(fake, config), gate) as engine:
        handle = await engine.submit(prompt="hello", params=tokens(4), timeout=asked)
        await gate.held(1)
        later(engine, 200)
        gate.open()
        if ends:
            with anyio.fail_after(GUARD_SECONDS), pytest.raises(GenerationTimeout):
                await read(handle)
        else:
            assert len(await read(handle)) == 4


async def test_who_waits_too_long_is_never_computed() -> None:
    fake = executor()
    async with running(toy_engine(fake)) as engine:
        with anyio.fail_after(GUARD_SECONDS), pytest.raises(GenerationTimeout):
            await engine.generate(prompt="hello", params=LONG, timeout=AT_ONCE)
        with pytest.raises(GenerationTimeout):
            await anyio.to_thread.run_sync(
                lambda: engine.generate_sync(prompt="hello", params=LONG, timeout=AT_ONCE)
            )
        assert fake.plans == 0
        await settle(engine)


async def test_the_deadline_of_a_request_is_that_of_all_its_outputs() -> None:
    fake = executor()
    gate = Gate(fake)
    async with running(toy_engine(fake), gate) as engine:
        handle = await engine.submit(prompt="hello", params=replace(LONG, n=3), timeout=100)
        gate.allow(2)
        await gate.held(3)
        later(engine, 200)
        gate.open()
        with anyio.fail_after(GUARD_SECONDS), pytest.raises(GenerationTimeout):
            await read(handle)
        await settle(engine)
        assert gate.arrived == 3


async def test_the_time_runs_while_the_model_is_loaded() -> None:
    door = Door()
    engine = Engine("fake", loader=Loader(door.wait))
    registry = CollectorRegistry()
    engine.metrics(registry)
    try:
        with anyio.fail_after(GUARD_SECONDS):
            with pytest.raises(GenerationTimeout, match="before the engine had started"):
                await engine.generate(prompt="hello", timeout=AT_ONCE)
            with pytest.raises(GenerationTimeout, match="before the engine had started"):
                await anyio.to_thread.run_sync(
                    lambda: engine.generate_sync(prompt="hello", timeout=AT_ONCE)
                )
        assert engine.state == "starting"
        assert timeouts(registry) == 2
    finally:
        door.open()
        await engine.stop(drain=0)


@pytest.mark.parametrize(
    ("param", "value"),
    [
        *[("timeout", value) for value in (0, -1, math.inf, math.nan)],
        *[("priority", value) for value in (2**31, -(2**40))],
    ],
)
async def test_wrong_values_are_refused(param: str, value: float) -> None:
    engine = toy_engine()
    asked: dict[str, Any] = {"prompt": "hello", param: value}
    with pytest.raises(InvalidRequest) as caught:
        await engine.submit(**asked)
    assert caught.value.param == param
    assert engine.state == "new"


# ---- priorities ----


async def test_the_lower_number_goes_first() -> None:
    fake = executor()
    gate = Gate(fake)
    async with running(toy_engine(fake, EngineConfig(max_batch=1)), gate) as engine:
        first = await engine.submit(prompt="a", params=tokens(2))
        await gate.held(1)
        others = [
            await engine.submit(prompt=f"b{priority}", params=tokens(2), priority=priority)
            for priority in (0, 5, -1, 0)
        ]
        gate.open()
        for handle in [first, *others]:
            await read(handle)
    order = list(dict.fromkeys(row.request_id for row in fake.rows))
    ids = [handle.request_id for handle in others]
    assert order == [first.request_id, ids[2], ids[0], ids[3], ids[1]]


# ---- bounds ----


async def test_prompt_tokens_that_wait_are_bounded() -> None:
    fake = executor()
    gate = Gate(fake)
    config = EngineConfig(max_batch=1, max_queue_tokens=100)
    async with running(toy_engine(fake, config), gate) as engine:
        ask = partial(engine.submit, params=tokens(2))
        # Longer than the bound, but nothing else waits: else it would never come in.
        handles = [await ask(prompt_token_ids=[1] * 150)]
        with pytest.raises(EngineOverloaded, match="150 prompt tokens are waiting"):
            await ask(prompt_token_ids=[2])
        await gate.held(1)
        gate.allow(1)
        assert (await anext(handles[0])).tokens  # its prompt is computed: it waits no more
        handles += [await ask(prompt_token_ids=[3] * 60), await ask(prompt_token_ids=[4] * 40)]
        with pytest.raises(EngineOverloaded, match="100 prompt tokens are waiting"):
            await ask(prompt_token_ids=[5])
        assert engine.live_requests == 3
        handles.pop().cancel()
        gate.allow(1)
        await gate.held(3)
        handles.append(await ask(prompt_token_ids=[6] * 40))  # as many as were given up
        with pytest.raises(EngineOverloaded):
            await ask(prompt_token_ids=[7])
        gate.open()
        for handle in handles:
            await read(handle)
        await settle(engine)
        assert engine._running().delivery.unprefilled_tokens == 0


async def test_outputs_of_one_prompt_count_its_tokens_once() -> None:
    fake = executor()
    gate = Gate(fake)
    config = EngineConfig(max_queue_tokens=100)
    async with running(toy_engine(fake, config), gate) as engine:
        handle = await engine.submit(prompt_token_ids=[1] * 60, params=replace(tokens(2), n=3))
        other = await engine.submit(prompt_token_ids=[1] * 40, params=tokens(2))
        with pytest.raises(EngineOverloaded):
            await engine.submit(prompt_token_ids=[1])
        gate.open()
        await read(handle)
        await read(other)
        assert engine._running().delivery.unprefilled_tokens == 0


async def test_the_bounds_hold_however_many_submit_at_once() -> None:
    rounds, threads, room = 12, 16, 5
    fake = executor()
    gate = Gate(fake)
    config = EngineConfig(max_batch=2, max_queue=3, max_queue_tokens=5)
    interval = sys.getswitchinterval()
    async with running(toy_engine(fake, config), gate) as engine:
        await engine.start()

        def submit(barrier: threading.Barrier) -> RequestHandle | None:
            barrier.wait(GUARD_SECONDS)
            try:
                return engine.submit_sync(prompt_token_ids=[1], params=LONG)
            except EngineOverloaded:
                return None

        def storm() -> None:
            for _ in range(rounds):
                barrier = threading.Barrier(threads)
                with ThreadPoolExecutor(threads) as pool:
                    taken = list(pool.map(submit, [barrier] * threads))
                handles = [handle for handle in taken if handle is not None]
                assert len(handles) == room
                assert engine.live_requests == room
                for handle in handles:
                    handle.cancel()
                gate.allow(1)
                while engine.live_requests:
                    time.sleep(0)

        sys.setswitchinterval(1e-6)
        try:
            await anyio.to_thread.run_sync(storm)
        finally:
            sys.setswitchinterval(interval)


class NotingLock:
    """Tells when somebody wants it who has to wait."""

    def __init__(self) -> None:
        self.wanted = threading.Event()
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            self.wanted.set()
            self._lock.acquire()

    def __exit__(self, *exc_info: object) -> None:
        self._lock.release()


def test_nobody_comes_between_the_look_at_the_bound_and_the_registration() -> None:
    delivery = Delivery(lambda wakeups: None)
    lock = NotingLock()
    delivery._lock = lock  # type: ignore[assignment]
    seen: list[int] = []

    def register(check: Callable[[int, int], None]) -> None:
        outbox, name = ThreadOutbox(), uuid4().hex
        mailbox = Mailbox(RequestId(name), outbox, lambda _: None, lambda _: None)
        delivery.register(mailbox, check=check)

    def note(live: int, unprefilled: int) -> None:
        seen.append(live)
        lock.wanted.set()

    second = threading.Thread(target=register, args=(note,))

    def look(live: int, unprefilled: int) -> None:
        second.start()
        assert lock.wanted.wait(GUARD_SECONDS)

    register(look)
    second.join(GUARD_SECONDS)
    assert seen == [1]


@pytest.mark.parametrize(
    ("rate", "seconds"), [(0.25, 6.0), (100.0, 1.0), (0.0, 30.0), (0.001, 60.0)]
)
async def test_when_to_ask_again_follows_from_how_fast_others_finish(
    rate: float, seconds: float
) -> None:
    fake = executor()
    gate = Gate(fake)
    async with running(toy_engine(fake, EngineConfig(max_batch=2, max_queue=3)), gate) as engine:
        handles = [await engine.submit(prompt="hello", params=tokens(2)) for _ in range(5)]
        await gate.held(1)
        scheduler = engine._running().scheduler
        # While a step is held nobody publishes another.
        scheduler._load = replace(scheduler.load, num_running=2, finish_rate=rate)
        with pytest.raises(EngineOverloaded) as caught:
            await engine.submit(prompt="one more")
        assert caught.value.retry_after == seconds  # half of the three that wait, at that rate
        for handle in handles:
            handle.cancel()
