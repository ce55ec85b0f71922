"""What `DisconnectMiddleware` costs a request: the same app with and without it, in turns.

No server and no sockets: an app is called as a server calls it, each request in a task of its own.
A round is a few hundred requests one after the other; rounds with and without the middleware
alternate, first the one, then the other, and each pair gives one difference, so that what slows the
machine down for a while slows both. Wall time and the thread's CPU time are both taken.
"""

from __future__ import annotations

import gc
import json
import time
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, get_args

import anyio
import anyio.lowlevel
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from qwen3_asgi.bench.figures import Spread, columns
from qwen3_asgi.bench.loops import LoopName, as_task, run_on
from qwen3_asgi.engine.binding import current_binding
from qwen3_asgi.engine.mailbox import Mailbox
from qwen3_asgi.engine.outbox import ThreadOutbox
from qwen3_asgi.middleware import DisconnectMiddleware
from qwen3_asgi.scheduler.plan import RequestId

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from starlette.requests import Request
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

# "bare" answers with two messages and nothing else; "starlette" is a routed plain endpoint;
# "binding" is "bare" after a generation was bound, so that the watcher runs beside it.
AppName = Literal["bare", "starlette", "binding"]
APPS: tuple[AppName, ...] = get_args(AppName)
# Wall and CPU.
Figures = tuple[float, float]


@dataclass(frozen=True, slots=True)
class SeamOptions:
    """`rounds` pairs of `requests` each, per loop and app."""

    loops: tuple[LoopName, ...] = ("asyncio",)
    apps: tuple[AppName, ...] = APPS
    rounds: int = 60
    requests: int = 200


@dataclass(frozen=True, slots=True)
class SeamReport:
    """Microseconds per request. `added` is the spread of the pairs' differences; its `min` says
    little, the difference of the two minima `added_min` says more."""

    loop: LoopName
    app: AppName
    plain: Spread
    watched: Spread
    added: Spread
    added_min: float
    added_cpu: Spread
    added_cpu_min: float


def run_seam(options: SeamOptions) -> list[SeamReport]:
    """One report per loop and app."""
    return [
        run_on(loop, partial(_measure, loop, app, options))
        for loop in options.loops
        for app in options.apps
    ]


def to_json(reports: list[SeamReport]) -> str:
    return json.dumps({"unit": "microseconds per request", "rows": [asdict(r) for r in reports]})


def table(reports: list[SeamReport]) -> str:
    """The reports as lines for a person."""
    rows = [["µs per request", "plain", "watched", "added", "p10", "p90", "min", "CPU", "CPU min"]]
    for report in reports:
        figures = [
            report.plain.median,
            report.watched.median,
            report.added.median,
            report.added.p10,
            report.added.p90,
            report.added_min,
            report.added_cpu.median,
            report.added_cpu_min,
        ]
        rows.append([f"{report.loop}, {report.app}", *(f"{figure:.1f}" for figure in figures)])
    return columns(rows)


async def _measure(loop: LoopName, name: AppName, options: SeamOptions) -> SeamReport:
    app = _app(name)
    plain, watched = (partial(_round, each, options.requests) for each in (app, _watched(app)))
    for _ in range(2):
        await plain()
        await watched()
    # What lives already is not looked at by collections while the rounds run.
    gc.collect()
    gc.freeze()
    try:
        pairs = [await _pair(plain, watched, first=i % 2 == 0) for i in range(options.rounds)]
    finally:
        gc.unfreeze()
    wall, cpu = ([(a[i], b[i]) for a, b in pairs] for i in range(2))
    return SeamReport(
        loop,
        name,
        plain=Spread.of(a for a, _ in wall),
        watched=Spread.of(b for _, b in wall),
        added=Spread.of(b - a for a, b in wall),
        added_min=_between_minima(wall),
        added_cpu=Spread.of(b - a for a, b in cpu),
        added_cpu_min=_between_minima(cpu),
    )


async def _pair(
    plain: Callable[[], Awaitable[Figures]],
    watched: Callable[[], Awaitable[Figures]],
    *,
    first: bool,
) -> tuple[Figures, Figures]:
    if first:
        a = await plain()
        return a, await watched()
    b = await watched()
    return await plain(), b


def _between_minima(pairs: list[Figures]) -> float:
    return round(min(b for _, b in pairs) - min(a for a, _ in pairs), 3)


async def _round(app: ASGIApp, requests: int) -> Figures:
    """Wall and CPU microseconds per request."""
    wall, cpu = time.perf_counter_ns(), time.thread_time_ns()
    for _ in range(requests):
        await as_task(partial(_request, app))
    elapsed = time.perf_counter_ns() - wall, time.thread_time_ns() - cpu
    return elapsed[0] / requests / 1000, elapsed[1] / requests / 1000


async def _request(app: ASGIApp) -> None:
    """One GET of a client that stays."""
    body_read = False

    async def receive() -> Message:
        nonlocal body_read
        if body_read:
            await anyio.sleep_forever()
        body_read = True
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Message) -> None:
        del message

    await app(_scope(), receive, send)


def _scope() -> dict[str, Any]:
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "GET",
        "scheme": "http",
        "path": "/",
        "raw_path": b"/",
        "query_string": b"",
        "root_path": "",
        "headers": [(b"host", b"bench")],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 2),
        "state": {},
    }


def _app(name: AppName) -> ASGIApp:
    return {"bare": _bare, "binding": _binding}.get(name) or Starlette(routes=[Route("/", _plain)])


def _watched(app: ASGIApp) -> ASGIApp:
    if isinstance(app, Starlette):  # where `add_middleware` would put it
        inner = Starlette(routes=[Route("/", _plain)])
        inner.add_middleware(DisconnectMiddleware)
        return inner
    return DisconnectMiddleware(app)


async def _plain(request: Request) -> PlainTextResponse:
    del request
    return PlainTextResponse("pong")


async def _bare(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"pong"})


async def _binding(scope: Scope, receive: Receive, send: Send) -> None:
    """As a handler that has submitted one generation and read its only batch."""
    mailbox = Mailbox(RequestId("r"), ThreadOutbox(), _ignore, _ignore)
    binding = current_binding.get()
    if binding is not None:
        binding.bind(mailbox)
    await anyio.lowlevel.checkpoint()
    if binding is not None:
        binding.unbind(mailbox)
    await _bare(scope, receive, send)


def _ignore(value: str) -> None:
    del value
