"""The cells: what a client does to a server, and what is seen of it.

A step is held while a client leaves, so what a cell counts does not depend on the machine's speed.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from tests.hosts.apps.stage import MAX_PREFILL_TOKENS
from tests.hosts.matrix.app import FIRST, REST, TOKENS
from tests.hosts.matrix.clients import Http1, Http2, fin, half_close, rst
from tests.hosts.server import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.hosts.matrix.clients import Connection
    from tests.hosts.matrix.host import Counters, Host

    Leave = Callable[[Connection], None]

MOUNTED = "/llm/v1/completions"
# Steps until the one that is held. All prompts but the long one are prefilled in one step.
DECODING, LONG_PREFILL = 5, 2
# The outcomes that keep the promise.
STOPPED = "stopped"
NOTHING_STARTED = "nothing started"
WENT_ON = "went on"
ANSWERED = "answer arrives"
# Those that don't, see `limits.py`.
LATE = "stopped late"
TO_THE_END = "ran to its end"
LOST = "answer lost"
STUCK = "app stuck in send"


@dataclass(frozen=True)
class Seen:
    """What a cell saw. `steps` began for the gone client after the one that ran when it left."""

    outcome: str
    steps: int = 0
    wasted: int = 0
    milliseconds: float | None = None
    ended: str = "returned"


@dataclass(frozen=True)
class Cell:
    """`run` is told whether this server tells the app; `good` is the outcome to have."""

    row: str
    how: str
    good: str
    run: Callable[[Host, bool], Seen]

    @property
    def name(self) -> str:
        return f"{self.row}: {self.how}" if self.how else self.row


def body(prompt: str, *, stream: bool, max_tokens: int = TOKENS) -> bytes:
    asked = {"model": "fake", "prompt": prompt, "max_tokens": max_tokens, "stream": stream}
    return json.dumps(asked).encode()


def long_prompt(tag: str) -> str:
    """Many prefill steps long, and no prefix of another's."""
    return f"{tag} " + "many words " * (4 * MAX_PREFILL_TOKENS)


def leave_while_held(
    host: Host, connection: Connection, tag: str, leave: Leave, *, tells: bool
) -> tuple[float, int]:
    """Leave, see whether the app is told, let the step go; when it was, and the steps begun."""
    held = host.wait_held()
    left_at = time.monotonic()
    leave(connection)
    if tells:
        host.wait_told(tag)
    else:
        host.glance(lambda: host.told(tag))
    host.release()
    return left_at, held


def abandon(
    host: Host, tells: bool, *, leave: Leave, stream: bool, hold: int, keep_alive: bool = False
) -> Seen:
    """One generation, mounted app."""
    connection = host.connect()
    if keep_alive:
        finish_one(connection)
        host.wait_idle()
    tag, before = host.tag(), host.counters()
    host.arm(hold)
    prompt = long_prompt(tag) if hold == LONG_PREFILL else tag
    asked = connection.request(f"{MOUNTED}?tag={tag}", body(prompt, stream=stream))
    host.wait_held()
    if stream and hold != LONG_PREFILL:
        connection.read_until(b"data: ", asked)
    return judge(host, tag, before, *leave_while_held(host, connection, tag, leave, tells=tells))


def finish_one(connection: Connection) -> None:
    asked = connection.request(MOUNTED, body("a first one", stream=False, max_tokens=2))
    connection.read_until(b"total_tokens", asked)


def judge(host: Host, tag: str, before: Counters, left_at: float, held: int) -> Seen:
    """The verdict on one abandoned generation, when everything has come to rest."""
    call = host.wait_ended(tag)
    state = host.wait_idle()
    wasted, cancelled = host.counters() - before
    steps = state["steps"] - held
    outcome = TO_THE_END if not cancelled else LATE if steps else STOPPED
    return Seen(outcome, steps, wasted, milliseconds(call, left_at), call["ended"])


def milliseconds(call: dict[str, Any] | None, left_at: float) -> float | None:
    """From the hang-up to the message in the app; None if there was none."""
    if call is None or call["disconnected_at"] is None:
        return None
    return float(call["disconnected_at"] - left_at) * 1000


def upload(host: Host, tells: bool, *, leave: Leave) -> Seen:
    """Half a body to the mounted app, which starts nothing before it has all of it."""
    tag, before = host.tag(), host.state()
    connection = host.connect()
    port = connection.socket.getsockname()[1]
    connection.request(f"{MOUNTED}?tag={tag}", b'{"model": "fake", ', of=1000)
    if tells:
        wait_until(lambda: host.call(tag), "the app is called")
    left_at = time.monotonic()
    leave(connection)
    if tells:
        host.wait_told(tag)
        call = host.wait_ended(tag)
        assert call["ended"] == "returned", call
    wait_until(lambda: not host.has_connection_from(port), "the server has let go")
    assert host.wait_idle()["steps"] == before["steps"]
    return Seen(NOTHING_STARTED, milliseconds=milliseconds(host.call(tag), left_at))


def early(host: Host, tells: bool, *, leave: Leave) -> Seen:
    """Half a body to an endpoint that generates from the first part on."""
    tag, before = host.tag(), host.counters()
    connection = host.connect()
    if not tells:  # the app is not called at all
        port, begun = connection.socket.getsockname()[1], host.state()["steps"]
        connection.request(f"/early?tag={tag}", b"half of it", of=1000)
        leave(connection)
        wait_until(lambda: not host.has_connection_from(port), "the server has let go")
        assert host.call(tag) is None
        assert host.wait_idle()["steps"] == begun
        return Seen(NOTHING_STARTED)
    host.arm(DECODING)
    connection.request(f"/early?tag={tag}", b"half of it", of=1000)
    return judge(host, tag, before, *leave_while_held(host, connection, tag, leave, tells=tells))


def after(host: Host, tells: bool, *, leave: Leave) -> Seen:
    """The response is complete and its background task generates."""
    del tells
    tag, before, counted = host.tag(), host.state(), host.counters()
    connection = host.connect()
    port = connection.socket.getsockname()[1]
    host.arm(DECODING)
    asked = connection.request(f"/background?tag={tag}", b"{}")
    connection.read_until(b"done", asked)
    held = host.wait_held()
    leave(connection)
    # hypercorn keeps it until the task has ended, and some seconds longer.
    host.glance(lambda: host.state() and not host.has_connection_from(port))
    host.release()
    call, state = host.wait_ended(tag), host.wait_idle()
    assert call["ended"] == "returned", call
    assert state["endings"]["finished"] == before["endings"].get("finished", 0) + 1
    assert host.counters() == counted
    return Seen(WENT_ON, state["steps"] - held)


def pipeline(host: Host, tells: bool, *, leave: Leave, stream: bool) -> Seen:
    """A second request waits behind the one that is being answered."""
    tag, second, before = host.tag(), host.tag(), host.counters()
    connection = host.connect()
    host.arm(DECODING)
    both = [Http1.encode(f"{MOUNTED}?tag={it}", body(it, stream=stream)) for it in (tag, second)]
    connection.socket.sendall(b"".join(both))
    host.wait_held()
    if stream:
        connection.read_until(b"data: ")
    port = connection.socket.getsockname()[1]
    left_at, held = leave_while_held(host, connection, tag, leave, tells=tells)
    host.wait_ended(tag)
    wait_until(lambda: not host.has_connection_from(port), "the server has let go")
    if host.call(second) is not None:
        host.wait_ended(second)
    return judge(host, tag, before, left_at, held)


def half_closed_unwatched(host: Host, tells: bool) -> Seen:
    """Does the answer of an app that goes on arrive?"""
    del tells
    tag = host.tag()
    connection = host.connect()
    asked = connection.request(f"/unwatched/?tag={tag}", b"{}")
    connection.read_until(FIRST, asked)
    left_at = time.monotonic()
    half_close(connection)
    host.wait_told(tag)
    after = milliseconds(host.call(tag), left_at)
    if not host.glance(lambda: (host.call(tag) or {})["ended"]):
        return Seen(STUCK, milliseconds=after, ended="")
    return Seen(ANSWERED if REST in connection.read_rest(asked) else LOST, milliseconds=after)


def reset_one_of_two(host: Host, tells: bool) -> Seen:
    """RST_STREAM on one stream; the other one on the connection goes on undisturbed."""
    tag, other, before = host.tag(), host.tag(), host.counters()
    connection = host.connect()
    assert isinstance(connection, Http2)
    host.arm(DECODING)
    gone = connection.request(f"{MOUNTED}?tag={tag}", body(tag, stream=True))
    stays = connection.request(f"{MOUNTED}?tag={other}", body(other, stream=True))
    host.wait_held()
    wait_until(lambda: host.state()["live"] == 2, "both are live")
    connection.read_until(b"data: ", gone)

    def leave(_: Connection) -> None:
        connection.reset_stream(gone)

    left_at, _ = leave_while_held(host, connection, tag, leave, tells=tells)
    answer = connection.read_rest(stays)
    host.wait_ended(other)
    call = host.wait_ended(tag)
    *rows, _ = sorted(host.wait_idle()["rows_after"].values())
    wasted, cancelled = host.counters() - before
    assert b"[DONE]" in answer, answer
    assert cancelled == 1
    return Seen(LATE if rows else STOPPED, sum(rows), wasted, milliseconds(call, left_at))


def go_away(host: Host, tells: bool) -> Seen:
    """GOAWAY from a client that reads on: it only promises to open no more streams."""
    tag = host.tag()
    connection = host.connect()
    assert isinstance(connection, Http2)
    host.arm(DECODING)
    asked = connection.request(f"{MOUNTED}?tag={tag}", body(tag, stream=True))
    held = host.wait_held()
    connection.go_away()
    told = host.glance(lambda: host.told(tag))
    assert told is tells
    host.release()
    answer = connection.read_rest(asked)
    host.wait_ended(tag)
    steps = host.wait_idle()["steps"] - held
    return Seen(ANSWERED if b"[DONE]" in answer else LOST, steps)


def go_away_and_close(connection: Connection) -> None:
    assert isinstance(connection, Http2)
    connection.go_away()
    fin(connection)


def _both_ways(row: str, good: str, run: Callable[..., Seen], **how: Any) -> list[Cell]:
    return [
        Cell(row, way, good, partial(run, leave=leave, **how))
        for way, leave in (("FIN", fin), ("RST", rst))
    ]


COMMON = [
    *_both_ways("before the response starts", STOPPED, abandon, stream=False, hold=DECODING),
    *_both_ways("during a long prefill", STOPPED, abandon, stream=True, hold=LONG_PREFILL),
    *_both_ways("in mid-stream", STOPPED, abandon, stream=True, hold=DECODING),
    *_both_ways("while the body is sent", NOTHING_STARTED, upload),
    *_both_ways("while the body is sent, generating", STOPPED, early),
    *_both_ways("after the response", WENT_ON, after),
    *_both_ways(
        "second request on the connection",
        STOPPED,
        abandon,
        stream=True,
        hold=DECODING,
        keep_alive=True,
    ),
    Cell("half-close", "", STOPPED, partial(abandon, leave=half_close, stream=True, hold=DECODING)),
    Cell("half-close, app that goes on", "", ANSWERED, half_closed_unwatched),
]
HTTP1 = [
    *COMMON,
    *_both_ways("pipelined, streaming", STOPPED, pipeline, stream=True),
    *_both_ways("pipelined, not streaming", STOPPED, pipeline, stream=False),
]
HTTP2 = [
    *COMMON,
    Cell("one of two streams", "RST_STREAM", STOPPED, reset_one_of_two),
    Cell(
        "in mid-stream",
        "GOAWAY, then FIN",
        STOPPED,
        partial(abandon, leave=go_away_and_close, stream=True, hold=DECODING),
    ),
    Cell("GOAWAY, reading on", "", ANSWERED, go_away),
]


def cells(*, http2: bool) -> list[Cell]:
    return HTTP2 if http2 else HTTP1
