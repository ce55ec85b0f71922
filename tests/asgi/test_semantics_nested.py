"""Watches inside each other watch once; what runs after the answer or beside it is left alone."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel
import httpx
import pytest
from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.responses import PlainTextResponse
from starlette.routing import Mount, Route

from qwen3_asgi import ClientDisconnected, DisconnectMiddleware, create_app
from tests.asgi.staged import answer, served
from tests.asgi.wire import DISCONNECT, EMPTY, Wire, http_scope, part
from tests.engine.engines import LONG, quiet, tokens

if TYPE_CHECKING:
    from starlette.middleware.base import RequestResponseEndpoint
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import ASGIApp, Receive, Scope, Send

    from qwen3_asgi.asgi.watch import CancelPolicy
    from tests.asgi.staged import Stage

pytestmark = pytest.mark.anyio


async def pass_on(request: Request, call_next: RequestResponseEndpoint) -> Response:
    return await call_next(request)


def hosts(stage: Stage, registry: CollectorRegistry) -> dict[str, ASGIApp]:
    """The mounted app behind ever more watches."""
    llm = create_app(stage.engine, registry=registry)
    mounted = Starlette(routes=[Mount("/llm", llm)])
    hidden = Starlette(
        routes=[Mount("/llm", llm)],
        middleware=[
            Middleware(DisconnectMiddleware),
            Middleware(BaseHTTPMiddleware, dispatch=pass_on),
            Middleware(DisconnectMiddleware, cancel="request"),
        ],
    )
    return {
        "mounted": mounted,
        "middleware": DisconnectMiddleware(mounted),
        "middleware twice": DisconnectMiddleware(DisconnectMiddleware(mounted)),
        "around BaseHTTPMiddleware": hidden,
    }


@pytest.mark.parametrize(
    "host", ["mounted", "middleware", "middleware twice", "around BaseHTTPMiddleware"]
)
@pytest.mark.parametrize("stream", [False, True])
async def test_the_server_is_read_as_often_as_by_one_watch(
    stage: Stage, host: str, stream: bool
) -> None:
    registry = CollectorRegistry()
    asked = {"model": "fake", "prompt": "hello", "max_tokens": 3000, "stream": stream}
    body = json.dumps(asked).encode()
    wire = Wire(part(body[:20]), part(body[20:], more=False))
    scope = http_scope(method="POST", path="/llm/v1/completions")
    async with served(hosts(stage, registry)[host], wire, scope=scope):
        await stage.gate.held(1)
        await quiet()
        assert wire.calls == 3, "two for the body, and one that waits for the disconnect"
        wire.put(DISCONNECT)
    assert (wire.calls, wire.most_readers) == (3, 1)
    phase = "streaming" if stream else "before_response"
    counted = {
        sample.labels["phase"]: sample.value
        for family in registry.collect()
        for sample in family.samples
        if sample.name == "qwen3_asgi_client_disconnects_total"
    }
    assert counted[phase] == sum(counted.values()) == 1
    await stage.gone()


@pytest.mark.parametrize("cancel", ["generations", "request"])
@pytest.mark.parametrize("hidden", [False, True])
async def test_a_background_task_runs_to_its_end_after_the_client(
    stage: Stage, hidden: bool, cancel: CancelPolicy
) -> None:
    """Servers report a disconnect when the answer is complete, whether anybody left or not."""
    stage.gate.open()
    wire = Wire(EMPTY)

    async def later() -> None:
        wire.put(DISCONNECT)
        await quiet(50)
        output = await stage.engine.generate(prompt="later", params=tokens(30))
        stage.notes.append(len(output.token_ids))

    async def now(request: Request) -> Response:
        output = await stage.engine.generate(prompt="now", params=tokens(2))
        return PlainTextResponse(output.text, background=BackgroundTask(later))

    between = [Middleware(BaseHTTPMiddleware, dispatch=pass_on)] if hidden else []
    app = Starlette(
        routes=[Route("/", now)],
        middleware=[
            Middleware(DisconnectMiddleware, cancel=cancel),
            *between,
            Middleware(DisconnectMiddleware, cancel=cancel),
        ],
    )
    async with served(app, wire):
        pass
    assert stage.notes == [30]
    assert wire.sent[0]["status"] == 200


@pytest.mark.parametrize("kind", ["lifespan", "something new"])
async def test_other_scopes_are_passed_through_every_layer_as_they_are(kind: str) -> None:
    seen: list[Any] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.extend([scope, receive, send])

    wire = Wire()
    scope: Scope = {"type": kind}
    receive, send = wire.receive, wire.send
    watched = DisconnectMiddleware(DisconnectMiddleware(app), cancel="request")
    await watched(scope, receive, send)
    given = [scope, receive, send]
    assert all(a is b for a, b in zip(seen, given, strict=True))
    assert scope == {"type": kind}


async def test_the_lifespan_starts_and_stops_the_engine_through_the_middleware(
    stage: Stage,
) -> None:
    app = Starlette(
        lifespan=stage.engine.lifespan, middleware=[Middleware(DisconnectMiddleware)] * 2
    )
    wire = Wire({"type": "lifespan.startup"})
    states: list[str] = []
    async with served(app, wire, scope={"type": "lifespan", "asgi": {"version": "3.0"}}):
        while not wire.sent:
            await anyio.lowlevel.checkpoint()
        states.append(stage.engine.state)
        wire.put({"type": "lifespan.shutdown"})
    assert wire.sent_types == ["lifespan.startup.complete", "lifespan.shutdown.complete"]
    states.append(stage.engine.state)
    assert states == ["ready", "stopped"]


@pytest.mark.parametrize("cancel", ["generations", "request"])
async def test_a_request_made_in_process_is_a_request_of_its_own(
    stage: Stage, cancel: CancelPolicy
) -> None:
    """Its client is the handler that made it: it ends when that one is cancelled, not before."""
    wire = Wire(EMPTY)

    async def inner(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            output = await stage.engine.generate(prompt="hello", params=tokens(3))
        except BaseException as error:
            stage.notes.append(isinstance(error, anyio.get_cancelled_exc_class()))
            raise
        stage.notes.append(len(output.token_ids))
        await answer(send)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        transport = httpx.ASGITransport(DisconnectMiddleware(inner))
        async with httpx.AsyncClient(transport=transport, base_url="http://inner") as client:
            await client.get("/")
        with pytest.raises(ClientDisconnected):
            await stage.engine.generate(prompt="hello", params=LONG)

    async def watch_from_the_start(scope: Scope, receive: Receive, send: Send) -> None:
        stage.notes.append(await stage.engine.submit(prompt="the outer one", params=LONG))
        await app(scope, receive, send)

    async with served(DisconnectMiddleware(watch_from_the_start, cancel=cancel), wire):
        await stage.gate.held(1)
        await stage.live(2)
        wire.put(DISCONNECT)
        await quiet()
        stage.gate.open()
    assert stage.notes[1:] == ([3] if cancel == "generations" else [True])
