"""Where a server makes it impossible: one table, with the server's real behaviour and the reason.

A cell in it asserts that behaviour, so it fails when the server gets better.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from tests.hosts.apps.stage import MAX_PREFILL_TOKENS
from tests.hosts.matrix.cells import (
    LATE,
    LOST,
    NOTHING_STARTED,
    STOPPED,
    STUCK,
    TO_THE_END,
)

if TYPE_CHECKING:
    from tests.hosts.matrix.cells import Cell, Seen
    from tests.hosts.matrix.host import Place


class Limit(NamedTuple):
    """`example` is a function of `reproduce.py`; `told`: the app is told all the same.

    `by_chance` are better outcomes that the timing may give, and that prove nothing.
    """

    outcome: str
    reason: str
    example: str
    told: bool = False
    ended: frozenset[str] = frozenset({"returned"})
    by_chance: frozenset[str] = frozenset()


_PIPELINED = (
    "While a second request waits behind the one that is being answered, the server does not read "
    "the connection (uvicorn, hypercorn) or does not look at its end (granian), so it does not "
    "notice that the client has gone."
)
_LATE = (
    f"{_PIPELINED} A stream ends when the server fails to write to it, after a few steps; "
    "with uvicorn and uvloop that failure is a `RuntimeError` of `send`, which stands in the log."
)
_TO_THE_END = (
    f"{_PIPELINED} An answer that is not streamed is computed to its end. The second request is "
    "not computed: its client is known to be gone by then, if the app is called at all."
)
_WHOLE_BODY = (
    "daphne collects the whole request body before it calls the app. So nothing can be generated "
    "while the body is sent, and nothing is left to stop."
)
_HALF_CLOSE = "The server closes the whole connection when the client closes its sending half."
_STUCK = (
    "hypercorn takes the end of the client's half for the end of the connection, and the `send` of "
    "a response's last message then waits for ever. It does so after every loss of an HTTP/2 "
    "connection, so an app must not insist on finishing its answer. Ours doesn't."
)
_GO_AWAY = "The server closes the connection when it gets a GOAWAY, instead of finishing streams."

_FAILED_WRITE = frozenset({"returned", "RuntimeError"})
# The write that fails may be the one of the step that ran when the client left.
_LATE_LIMIT = Limit(LATE, _LATE, "pipelining", ended=_FAILED_WRITE, by_chance=frozenset({STOPPED}))
_TO_THE_END_LIMIT = Limit(TO_THE_END, _TO_THE_END, "pipelining", ended=_FAILED_WRITE)
_LOST_LIMIT = Limit(LOST, _HALF_CLOSE, "half_close", told=True)

# (column, protocol, row) -> what it does instead; for every way to leave.
LIMITS: dict[tuple[str, str, str], Limit] = {
    **{
        (column, "HTTP/1.1", row): limit
        for column in ("uvicorn httptools", "hypercorn asyncio", "hypercorn trio", "granian")
        for row, limit in (
            ("pipelined, streaming", _LATE_LIMIT),
            ("pipelined, not streaming", _TO_THE_END_LIMIT),
        )
    },
    **{
        ("daphne", protocol, "while the body is sent, generating"): Limit(
            NOTHING_STARTED, _WHOLE_BODY, "body"
        )
        for protocol in ("HTTP/1.1", "HTTP/2")
    },
    **{
        (column, protocol, "half-close, app that goes on"): _LOST_LIMIT
        for column, protocol in (
            ("uvicorn h11", "HTTP/1.1"),
            ("uvicorn httptools", "HTTP/1.1"),
            ("granian", "HTTP/1.1"),
            ("granian", "HTTP/2"),
            ("daphne", "HTTP/1.1"),
            ("daphne", "HTTP/2"),
        )
    },
    **{
        (column, "HTTP/2", "half-close, app that goes on"): Limit(
            STUCK, _STUCK, "half_close", told=True, ended=frozenset({""})
        )
        for column in ("hypercorn asyncio", "hypercorn trio")
    },
    **{
        (column, "HTTP/2", "GOAWAY, reading on"): Limit(LOST, _GO_AWAY, "goaway", told=True)
        for column in ("hypercorn asyncio", "hypercorn trio", "daphne")
    },
}
# Rows in which the server tells nothing because there is nothing to tell.
UNTOLD = {
    ("daphne", "HTTP/1.1", "while the body is sent"),
    ("daphne", "HTTP/2", "while the body is sent"),
    ("granian", "HTTP/2", "GOAWAY, reading on"),
}


def key(place: Place, row: str) -> tuple[str, str, str]:
    return place.column.name, "HTTP/2" if place.http2 else "HTTP/1.1", row


def limit_of(place: Place, cell: Cell) -> Limit | None:
    return LIMITS.get(key(place, cell.row))


def tells(place: Place, cell: Cell) -> bool:
    limit = limit_of(place, cell)
    return limit.told if limit else key(place, cell.row) not in UNTOLD


def check(place: Place, cell: Cell, seen: Seen) -> None:
    """
    Raises:
        AssertionError: the promise is broken, or a server does better than its limit says.
    """
    limit = limit_of(place, cell)
    if limit is not None:
        possible = {limit.outcome} | limit.by_chance
        assert seen.outcome in possible, f"no longer impossible, or worse: {seen}"
        assert seen.ended in limit.ended, seen
        return
    assert seen.outcome == cell.good, seen
    assert seen.ended == "returned", seen
    assert seen.wasted <= MAX_PREFILL_TOKENS, seen
    if cell.good == STOPPED:
        assert seen.steps == 0, seen
        assert seen.wasted > 0, f"the step that was held counts: {seen}"
