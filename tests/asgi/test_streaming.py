"""The stream of events as ASGI messages: what is sent, when, and how it ends."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from qwen3_asgi.asgi.streaming import EventStream, run_together
from qwen3_asgi.errors import ClientDisconnected, GenerationFailed

pytestmark = pytest.mark.anyio


class Wire:
    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []

    async def send(self, message: Any) -> None:
        self.messages.append(message)
        await anyio.sleep(0.001)

    @property
    def bodies(self) -> list[bytes]:
        return [m["body"] for m in self.messages if m["type"] == "http.response.body"]


def stream(wire: Wire, keep_alive_seconds: float = 60.0) -> EventStream:
    return EventStream(wire.send, keep_alive_seconds=keep_alive_seconds)


async def test_the_messages_of_a_stream() -> None:
    wire = Wire()
    events = stream(wire)

    async def produce() -> None:
        await events.send_frames([b"a", b"b"])
        await events.send_frames([])
        await events.end(b"c")

    await events.run(produce)
    assert wire.messages == [
        {
            "type": "http.response.start",
            "status": 200,
            "headers": [
                (b"content-type", b"text/event-stream; charset=utf-8"),
                (b"cache-control", b"no-cache"),
                (b"x-accel-buffering", b"no"),
            ],
        },
        {"type": "http.response.body", "body": b"ab", "more_body": True},
        {"type": "http.response.body", "body": b"c", "more_body": False},
    ]


async def test_silence_is_commented() -> None:
    wire = Wire()
    events = stream(wire, keep_alive_seconds=0.05)

    async def produce() -> None:
        await events.send_frames([b"x"])
        await anyio.sleep(0.3)
        await events.end(b"end")

    await events.run(produce)
    assert wire.bodies[0] == b"x"
    assert wire.bodies[-1] == b"end"
    assert set(wire.bodies[1:-1]) == {b": keep-alive\n\n"}


async def test_a_frame_puts_the_comment_off() -> None:
    wire = Wire()
    events = stream(wire, keep_alive_seconds=2.0)

    async def produce() -> None:
        for _ in range(5):
            await anyio.sleep(0.5)
            await events.send_frames([b"x"])
        await events.end(b"end")

    await events.run(produce)
    assert wire.bodies == [b"x"] * 5 + [b"end"]


async def test_no_comment_after_the_end() -> None:
    wire = Wire()
    events = stream(wire, keep_alive_seconds=0.01)

    async def produce() -> None:
        await events.end(b"end")
        await anyio.sleep(0.05)

    await events.run(produce)
    assert wire.bodies == [b"end"]


@pytest.mark.parametrize("error", [GenerationFailed("x"), ClientDisconnected("x"), OSError()])
async def test_errors_come_out_as_they_are(error: Exception) -> None:
    async def produce() -> None:
        raise error

    with pytest.raises(type(error)) as raised:
        await stream(Wire()).run(produce)
    assert raised.value is error


async def test_a_failing_send_of_a_comment_ends_the_stream() -> None:
    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            raise OSError("gone")

    events = EventStream(send, keep_alive_seconds=0.01)
    with pytest.raises(OSError, match="gone"), anyio.fail_after(5):
        await events.run(anyio.sleep_forever)


async def test_cancellation_goes_through() -> None:
    wire = Wire()
    with anyio.move_on_after(0.02) as scope:
        await stream(wire).run(anyio.sleep_forever)
    assert scope.cancelled_caught


async def test_together_runs_all_and_raises_the_first_error_bare() -> None:
    done: list[str] = []

    async def fine() -> None:
        done.append("fine")

    async def failing() -> None:
        await anyio.sleep(0.01)
        raise GenerationFailed("x")

    async def waiting() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            done.append("cancelled")

    with pytest.raises(GenerationFailed):
        await run_together([fine, failing, waiting])
    assert done == ["fine", "cancelled"]
    await run_together([fine, fine])
    assert done == ["fine", "cancelled", "fine", "fine"]
