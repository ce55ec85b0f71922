"""From the scheduler thread to event loops: one wake-up per loop and step, nothing lost, nobody
stopped by a neighbour."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING
from uuid import uuid4

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest

from qwen3_asgi.config import EngineConfig
from qwen3_asgi.engine.delivery import Delivery
from qwen3_asgi.engine.handle import RequestHandle
from qwen3_asgi.engine.mailbox import Mailbox
from qwen3_asgi.engine.outbox import READERS_PER_TURN, LoopOutbox
from qwen3_asgi.engine.portal import LoopClosed, LoopPortal
from qwen3_asgi.scheduler.events import Event, Finish
from qwen3_asgi.scheduler.plan import RequestId, SampledToken
from qwen3_asgi.testing import assert_idle
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
from tests.hosts.server import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable

    from qwen3_asgi.engine.engine import Engine

pytestmark = pytest.mark.anyio


class CountedPortal:
    """A loop portal that counts its wake-ups, holds them back, or says that its loop is closed."""

    def __init__(self, portal: LoopPortal) -> None:
        self._portal = portal
        self.native = portal.native
        self.calls = 0
        self.turns = 0
        self.held: list[Callable[[], object]] | None = None
        self.is_closed = False  # as trio, which knows it only when it is called
        self.refuses = False

    @property
    def is_here(self) -> bool:
        return self._portal.is_here

    def call_next(self, function: Callable[[], object]) -> None:
        if self.refuses:
            raise LoopClosed("closed")
        self.turns += 1
        self._portal.call_next(function)

    def call_soon(self, function: Callable[[], object]) -> None:
        if self.refuses:
            raise LoopClosed("closed")
        self.calls += 1
        if self.held is None:
            self._portal.call_soon(function)
        else:
            self.held.append(function)


def counted(handle: RequestHandle) -> CountedPortal:
    outbox = handle._mailboxes[0].outbox
    assert isinstance(outbox, LoopOutbox)
    outbox.portal = portal = CountedPortal(outbox.portal)  # type: ignore[assignment]
    return portal


async def consume(handle: RequestHandle) -> list[int]:
    return [token.token_id async for batch in handle for token in batch.tokens]


async def generates_right(engine: Engine, requests: int, count: int) -> None:
    """Run this many requests at once on this loop; each must get exactly its own tokens."""

    async def one(i: int) -> None:
        prompt = [i % VOCABULARY + 1, 2, i // VOCABULARY + 1]
        handle = await engine.submit(prompt_token_ids=prompt, params=tokens(count))
        assert await consume(handle) == expected(prompt, count)

    with anyio.fail_after(GUARD_SECONDS):
        async with anyio.create_task_group() as group:
            for i in range(requests):
                group.start_soon(one, i)


VOCABULARY = 200


async def test_sixty_four_readers_are_woken_once_per_step() -> None:
    fake = executor()
    gate = Gate(fake)
    steps = 100
    async with running(toy_engine(fake, EngineConfig(max_batch=64)), gate) as engine:
        handles = [await engine.submit(prompt="hello", params=tokens(steps)) for _ in range(64)]
        assert len({id(handle._mailboxes[0].outbox) for handle in handles}) == 1
        portal = counted(handles[0])
        received: list[int] = []

        async def read(handle: RequestHandle) -> None:
            received.append(len(await consume(handle)))

        with anyio.fail_after(GUARD_SECONDS):
            async with anyio.create_task_group() as group:
                for handle in handles:
                    group.start_soon(read, handle)
                gate.open()
        assert received == [steps] * 64
        assert portal.calls <= fake.plans
        await settle(engine)


async def test_a_neighbour_has_its_turn_between_the_readers_of_one_step() -> None:
    """Else a host with many streams is deaf, every step, until the last of them was served."""
    delivery = Delivery(lambda count: None)
    outbox = delivery.outbox_here()
    outbox.portal = portal = CountedPortal(outbox.portal)  # type: ignore[assignment]
    mailboxes = [new_mailbox(delivery, outbox, []) for _ in range(10 * READERS_PER_TURN)]
    served = 0
    unheard: list[int] = []

    async def read(mailbox: Mailbox) -> None:
        nonlocal served
        await anext(RequestHandle([mailbox], [1], None))
        served += 1

    async def neighbour() -> None:
        while served < len(mailboxes):
            before = served
            await anyio.lowlevel.checkpoint()
            unheard.append(served - before)

    with anyio.fail_after(GUARD_SECONDS):
        async with anyio.create_task_group() as group:
            for mailbox in mailboxes:
                group.start_soon(read, mailbox)
            await anyio.wait_all_tasks_blocked()
            group.start_soon(neighbour)
            await anyio.to_thread.run_sync(delivery.deliver, [token(m) for m in mailboxes])
    assert sum(unheard) == len(mailboxes)
    # Twice: trio runs what is due in random order, the neighbour first and then last.
    assert max(unheard) <= 2 * READERS_PER_TURN
    assert portal.calls == 1, "one wake-up from the thread; the other turns are the loop's own"


async def test_a_loop_that_closes_between_two_turns_is_noticed() -> None:
    cancelled: list[str] = []
    delivery = Delivery(lambda count: None)
    outbox = delivery.outbox_here()
    outbox.portal = portal = CountedPortal(outbox.portal)  # type: ignore[assignment]
    mailboxes = [new_mailbox(delivery, outbox, cancelled) for _ in range(READERS_PER_TURN + 1)]
    portal.held = []
    delivery.deliver([token(m) for m in mailboxes])
    portal.refuses = True
    portal.held.pop()()
    assert cancelled == []
    delivery.deliver([token(mailboxes[0])])
    assert cancelled == [mailbox.request_id for mailbox in mailboxes]


async def test_what_is_rung_during_the_turns_needs_no_second_wake_up_to_be_read() -> None:
    delivery = Delivery(lambda count: None)
    outbox = delivery.outbox_here()
    outbox.portal = portal = CountedPortal(outbox.portal)  # type: ignore[assignment]
    mailboxes = [new_mailbox(delivery, outbox, []) for _ in range(3 * READERS_PER_TURN)]
    got: list[int] = []

    async def read(mailbox: Mailbox) -> None:
        handle = RequestHandle([mailbox], [1], None)
        while sum(got) < 2 * len(mailboxes) and handle.finish is None:
            batch = await anext(handle)
            got.append(len(batch.tokens))

    with anyio.fail_after(GUARD_SECONDS):
        async with anyio.create_task_group() as group:
            for mailbox in mailboxes:
                group.start_soon(read, mailbox)
            await anyio.wait_all_tasks_blocked()
            delivery.deliver([token(m) for m in mailboxes])
            while not portal.turns:
                await anyio.lowlevel.checkpoint()
            last = Finish("length", 1, 0, 2)
            delivery.deliver(
                [Event(RequestId(m.request_id), SampledToken(2), last) for m in mailboxes]
            )
    assert sum(got) == 2 * len(mailboxes)
    assert portal.calls <= 2
    assert len(delivery) == 0


async def test_ten_thousand_tokens_reach_sixty_four_readers_in_order() -> None:
    async with running(toy_engine(config=EngineConfig(max_batch=64))) as engine:
        await generates_right(engine, 64, 160)
        await settle(engine)


async def test_a_reader_that_never_reads_stops_nobody_and_stays_bounded() -> None:
    async with running(toy_engine()) as engine:
        lazy = await engine.submit(prompt="lazy", params=tokens(50))
        await generates_right(engine, 8, 200)
        await settle(engine)
        assert len(lazy._mailboxes[0].events) == 50
        batch = await anext(lazy)
        assert [t.token_id for t in batch.tokens] == expected(lazy.prompt_token_ids, 50)
        assert batch.finish is not None


async def test_a_blocked_loop_gets_everything_in_one_batch_later() -> None:
    fake = executor()
    gate = Gate(fake)
    async with running(toy_engine(fake), gate) as engine:
        handle = await engine.submit(prompt="hello", params=tokens(40))
        portal = counted(handle)
        portal.held = []
        gate.allow(39)
        await gate.held(40)
        assert portal.calls == 1
        assert len(handle._mailboxes[0].events) == 39
        portal.held.pop()()
        assert len((await anext(handle)).tokens) == 39
        portal.held = None
        gate.open()
        assert len((await anext(handle)).tokens) == 1


async def test_one_engine_serves_two_asyncio_loops_a_trio_loop_and_threads_at_once() -> None:
    async with running(toy_engine(config=EngineConfig(max_batch=64))) as engine:
        work = partial(generates_right, engine, 12, 120)

        def sync() -> None:
            output = engine.generate_sync(prompt_token_ids=[7, 7], params=tokens(200))
            assert list(output.token_ids) == expected([7, 7], 200)

        async with anyio.create_task_group() as group:
            for backend in ("asyncio", "asyncio", "trio"):
                run = partial(anyio.run, work, backend=backend)
                group.start_soon(anyio.to_thread.run_sync, run)
            group.start_soon(anyio.to_thread.run_sync, sync)
            group.start_soon(work)
        await settle(engine)


def test_a_loop_that_closes_gets_its_requests_cancelled_and_disturbs_nobody() -> None:
    """The handles live on outside the loop, so that nothing but the loop's end cancels them."""
    fake = executor()
    gate = Gate(fake)
    engine = toy_engine(fake)
    orphans: list[RequestHandle] = []

    async def leave() -> None:
        orphans.extend([await engine.submit(prompt="orphan", params=LONG) for _ in range(3)])
        await gate.held(1)

    for backend in ("asyncio", "trio"):
        gate.hold()
        gate.arrived = 0
        anyio.run(leave, backend=backend)
        gate.open()
        output = engine.generate_sync(prompt_token_ids=[1, 2], params=tokens(100))
        assert list(output.token_ids) == expected([1, 2], 100)
    engine.stop_sync(drain=GUARD_SECONDS)
    for handle in orphans:
        computed = sum(row.request_id == handle.request_id for row in fake.rows)
        assert computed <= 2, "one step to notice the closed loop, none after the next sweep"


def test_a_loop_that_closes_with_a_wake_up_pending_is_noticed() -> None:
    """asyncio forgets the pending callback, so the wake-up that is under way never comes."""
    fake = executor()
    gate = Gate(fake)
    engine = toy_engine(fake)
    loop = asyncio.new_event_loop()
    handle = loop.run_until_complete(engine.submit(prompt="orphan", params=LONG))
    gate.allow(5)
    gate.held_sync(6)  # the loop stands still and has been woken, once
    loop.close()
    gate.allow(2)
    engine_thread_done = threading.Event()
    fake.on_drop = lambda request_id: engine_thread_done.set()
    assert engine_thread_done.wait(GUARD_SECONDS)
    assert fake.dropped == [handle.request_id]
    gate.open()
    engine.stop_sync(drain=GUARD_SECONDS)


@pytest.mark.skipif(
    tuple(map(int, version("anyio").split(".")[:2])) < (4, 15),
    reason="anyio itself keeps each asyncio loop that ran a thread, until 4.15",
)
def test_an_engine_keeps_no_event_loop_alive() -> None:
    def use_a_loop() -> weakref.ref[asyncio.AbstractEventLoop]:
        loop = asyncio.new_event_loop()
        loop.run_until_complete(engine.generate(prompt="hello", params=tokens(3)))
        loop.close()
        return weakref.ref(loop)

    def collected() -> bool:
        gc.collect()
        return reference() is None

    with toy_engine() as engine:
        reference = use_a_loop()
        assert_idle(engine)
        # The scheduler thread may be about to leave the delivery, whose frame still holds the loop.
        wait_until(collected, "the loop is collected")


# ---- the delivery alone ----


def new_mailbox(delivery: Delivery, outbox: LoopOutbox, cancelled: list[str]) -> Mailbox:
    mailbox = Mailbox(RequestId(uuid4().hex), outbox, cancelled.append, lambda phase: None)
    delivery.register(mailbox)
    return mailbox


def token(mailbox: Mailbox) -> Event:
    return Event(RequestId(mailbox.request_id), SampledToken(1), None)


def end(mailbox: Mailbox) -> Event:
    return Event(RequestId(mailbox.request_id), None, Finish("abort", 1, 0, 0))


async def test_one_loop_has_one_outbox() -> None:
    delivery = Delivery(lambda count: None)
    outbox = delivery.outbox_here()
    assert delivery.outbox_here() is outbox


async def test_a_wake_up_that_failed_does_not_hide_that_the_loop_is_closed() -> None:
    cancelled: list[str] = []
    delivery = Delivery(lambda count: None)
    outbox = delivery.outbox_here()
    outbox.portal = portal = CountedPortal(outbox.portal)  # type: ignore[assignment]
    one = new_mailbox(delivery, outbox, cancelled)
    portal.refuses = True
    one.fail(RuntimeError("first to find the closed loop; it has nobody to tell"))
    delivery.deliver([token(one)])
    assert cancelled == [one.request_id, one.request_id]
    delivery.deliver([end(one)])
    assert len(delivery) == 0


async def test_idle_is_reported_to_all_who_wait_and_only_when_nothing_is_live() -> None:
    delivery = Delivery(lambda count: None)
    mailbox = new_mailbox(delivery, delivery.outbox_here(), [])
    first, second = delivery.when_idle(), delivery.when_idle()
    delivery.deliver([token(mailbox)])
    assert not first.done()
    delivery.deliver([end(mailbox)])
    assert first.done()
    assert second.done()
    assert delivery.when_idle().done()


async def test_a_failure_is_read_before_the_abort_that_answers_its_cancel() -> None:
    """The scheduler may answer before `fail` has returned; the reader must not see an abort."""
    delivery = Delivery(lambda count: None)
    failures = []
    mailbox = Mailbox(
        RequestId("r"),
        delivery.outbox_here(),
        lambda request_id: failures.append(mailbox.failure),
        lambda phase: None,
    )
    error = RuntimeError("gone")
    mailbox.fail(error)
    assert failures == [error]


async def test_wake_ups_are_counted() -> None:
    counts: list[int] = []
    delivery = Delivery(counts.append)
    outbox = delivery.outbox_here()
    one, other = new_mailbox(delivery, outbox, []), new_mailbox(delivery, outbox, [])
    delivery.deliver([token(one), token(other)])
    delivery.deliver([token(one)])
    assert counts == [1]
