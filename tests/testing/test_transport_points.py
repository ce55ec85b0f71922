"""A client that hangs up by itself: at a call, at a turn of the loop, after so much was sent."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel
import pytest

from qwen3_asgi import DisconnectMiddleware, create_app
from qwen3_asgi.testing import HungUp, assert_idle_async, fake_engine
from tests.testing.client import DISCONNECT, END, START, chunk, client

if TYPE_CHECKING:
    from starlette.types import Message, Receive, Scope, Send

pytestmark = pytest.mark.anyio


class Recorded:
    """Reads its body, answers in two pieces; notes what it was doing when the client had gone."""

    def __init__(self) -> None:
        self.received: list[str] = []
        self.sent = 0
        self.ended = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.received, self.sent = [], 0
        message = await receive()
        self.received.append(message["type"])
        for message in (START, chunk(b"one"), chunk(b"two"), END):
            await send(message)
            self.sent += 1
        self.received.append((await receive())["type"])
        self.ended += 1


async def test_a_round_for_every_call_of_receive_and_send() -> None:
    app, seen = Recorded(), []
    async with client(app) as (http, transport):
        for call in transport.every_call():
            got: bytes | None = None
            with suppress(HungUp):
                got = (await http.post("/", content=b"x")).content
            await transport.ended()
            seen.append((call, app.received[0], got))
    # 1 is `receive`; 2 to 5 are `send`, of which the last completes the response; 6 is over.
    assert seen == [
        (1, "http.disconnect", None),
        (2, "http.request", None),
        (3, "http.request", None),
        (4, "http.request", None),
        (5, "http.request", None),
        (6, "http.request", b"onetwo"),
    ]
    assert app.ended == 6
    assert app.sent == 4  # swallowed or not, `send` returned


@pytest.mark.parametrize(
    ("point", "read"),
    [
        ({"messages": 1}, []),
        ({"messages": 2}, [b"one"]),
        ({"bytes": 1}, [b"one"]),
        ({"bytes": 4}, [b"one", b"two"]),
    ],
)
async def test_after_so_many_messages_or_bytes(point: dict[str, int], read: list[bytes]) -> None:
    app, got = Recorded(), []

    async def get() -> None:
        async with http.stream("GET", "/") as response:
            async for piece in response.aiter_raw():
                got.append(piece)  # noqa: PERF401 - also what came before it raised

    async with client(app) as (http, transport):
        transport.hang_up_after(**point)
        with pytest.raises(HungUp):
            await get()
        await transport.ended()
        assert app.received[-1] == "http.disconnect"
        transport.never_hang_up()
        assert (await http.get("/")).content == b"onetwo"
    assert got == read


async def test_after_the_whole_response_a_point_means_nothing() -> None:
    app = Recorded()
    async with client(app) as (http, transport):
        transport.hang_up_after(messages=4)
        assert (await http.get("/")).content == b"onetwo"


async def test_every_turn_reaches_an_app_that_waits_for_something_else() -> None:
    """Neither `receive` nor `send` is called there, so `every_call` could not."""
    seen: Counter[bool] = Counter()
    gone: list[Message] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        async with anyio.create_task_group() as group:

            async def watch() -> None:
                gone.append(await receive())

            group.start_soon(watch)
            for _ in range(10):
                await anyio.lowlevel.checkpoint()
            seen[bool(gone)] += 1
            group.cancel_scope.cancel()
        await send(START)
        await send(END)

    rounds = 0
    async with client(app) as (http, transport):
        for _ in transport.every_turn():
            gone.clear()
            rounds += 1
            with suppress(HungUp):
                await http.get("/")
            await transport.ended()
    assert seen[True] >= 5  # in the middle of the ten turns
    assert seen[False] >= 1
    assert rounds > 10


@pytest.mark.parametrize("stream", [False, True])
async def test_the_mounted_app_is_idle_wherever_its_client_leaves(stream: bool) -> None:
    engine = fake_engine()
    body = {"model": "fake", "prompt": "a story", "max_tokens": 3, "stream": stream}
    ended: Counter[Any] = Counter()
    app = create_app(engine, metrics=False)
    async with engine, client(app) as (http, transport):
        for _ in transport.every_call():
            try:
                response = await http.post("/v1/completions", json=body)
                ended[response.status_code] += 1
            except HungUp:
                ended["hung up"] += 1
            await transport.ended()
            await assert_idle_async(engine)
    assert ended[200] == 1
    assert ended["hung up"] >= 3


async def test_a_sweep_that_does_not_end_says_so() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(START)
        while (await receive())["type"] != "http.disconnect":
            pass

    async with client(app) as (http, transport):
        rounds = transport.every_call(limit=2)
        for expected in (1, 2):
            assert next(rounds) == expected
            with pytest.raises(HungUp):
                await http.get("/")
        with pytest.raises(RuntimeError, match="after 2 calls"):
            next(rounds)


async def test_send_can_raise_instead_of_swallowing() -> None:
    notes: list[Any] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send(START)
        assert await receive() is not DISCONNECT  # the body
        assert await receive() == DISCONNECT
        try:
            await send(END)
        except OSError as error:
            notes.append(error)
            raise

    async with client(DisconnectMiddleware(app), raise_on_send=True) as (http, transport):
        transport.hang_up_after(messages=1)
        with pytest.raises(HungUp):
            await http.get("/")
        with pytest.raises(OSError, match="disconnected"):
            await transport.ended()
    assert len(notes) == 1


@pytest.mark.parametrize("wrong", [{}, {"messages": 0}, {"messages": 1, "bytes": 1}])
async def test_a_point_is_one_number_from_one_on(wrong: dict[str, int]) -> None:
    async with client(Recorded()) as (_, transport):
        with pytest.raises(ValueError, match="exactly one"):
            transport.hang_up_after(**wrong)
