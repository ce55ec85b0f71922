"""Middleware of all kinds in front of ours and behind it, and ours in the wrong place."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel
import pytest
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.middleware.sessions import SessionMiddleware

from qwen3_asgi import ClientDisconnected, DisconnectMiddleware
from tests.engine.engines import settle, tokens
from tests.hosts.apps.starlette_host import build, pass_on
from tests.hosts.scene import LEAVER, STAYS

if TYPE_CHECKING:
    from starlette.middleware.base import RequestResponseEndpoint
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import Receive, Scope, Send

    from tests.hosts.scene import Scene

pytestmark = [
    pytest.mark.anyio,
    # What trio says when Starlette's streaming response drops a generator in the middle.
    pytest.mark.filterwarnings("ignore:Async generator:ResourceWarning"),
]


async def reads_body(request: Request, call_next: RequestResponseEndpoint) -> Response:
    """As those that check a signature or log what comes in."""
    size = len(await request.body())
    response = await call_next(request)
    response.headers["x-size"] = str(size)
    return response


async def greets(request: Request, call_next: RequestResponseEndpoint) -> Response:
    request.session["seen"] = True
    return await call_next(request)


OURS = Middleware(DisconnectMiddleware)
HIDES = Middleware(BaseHTTPMiddleware, dispatch=pass_on)
READS = Middleware(BaseHTTPMiddleware, dispatch=reads_body)
GZIP = Middleware(GZipMiddleware, minimum_size=1)
CORS = Middleware(CORSMiddleware, allow_origins=["http://elsewhere"])
SESSION = [
    Middleware(SessionMiddleware, secret_key="only for tests"),
    Middleware(BaseHTTPMiddleware, dispatch=greets),
]
# The first in the list is the outermost.
STACKS = {
    "behind five that hide": [OURS, HIDES, READS, HIDES, HIDES, HIDES],
    "in front of five that hide": [HIDES, READS, HIDES, HIDES, HIDES, OURS],
    "between those that hide": [HIDES, READS, OURS, READS, HIDES],
    "twice": [OURS, HIDES, OURS],
    "all others outside": [CORS, *SESSION, GZIP, OURS],
    "all others inside": [OURS, CORS, *SESSION, GZIP],
}


@pytest.mark.parametrize("stack", STACKS)
async def test_a_client_that_leaves_before_the_answer(scene: Scene, stack: str) -> None:
    await scene.leave(build(scene.stage, stack=STACKS[stack]), "/generate")
    assert scene.told() == {"ClientDisconnected": 1}


@pytest.mark.parametrize("stack", STACKS)
async def test_a_client_that_leaves_a_stream(scene: Scene, stack: str) -> None:
    await scene.leave(build(scene.stage, stack=STACKS[stack]), "/stream", mid_stream=True)
    scene.told()


@pytest.mark.parametrize("stack", STACKS)
async def test_a_client_that_leaves_the_mounted_app(scene: Scene, stack: str) -> None:
    await scene.leave(
        build(scene.stage, stack=STACKS[stack]),
        "/llm/v1/completions",
        body={"model": "fake"},
        stays="/llm/v1/completions",
    )


@pytest.mark.parametrize("stack", ["all others outside", "all others inside"])
async def test_the_others_still_do_their_work(scene: Scene, stack: str) -> None:
    scene.gate.open()
    app = build(scene.stage, stack=STACKS[stack])
    headers = {"origin": "http://elsewhere", "accept-encoding": "gzip"}
    async with scene.client(app, **headers) as http:
        for path in ("/generate", "/stream"):
            answer = await http.post(path, json=LEAVER | {"max_tokens": 5})
            assert answer.headers["content-encoding"] == "gzip"
            assert answer.headers["access-control-allow-origin"] == "http://elsewhere"
            assert "session=" in answer.headers["set-cookie"]
            assert (
                answer.json() == {"tokens": 5} if path == "/generate" else "data: " in answer.text
            )


async def test_what_the_router_notes_in_the_scope_reaches_middleware_outside(scene: Scene) -> None:
    """Counters and tracers outside read the route from there when the answer is on its way."""
    scene.gate.open()
    inner = build(scene.stage, stack=[OURS])
    seen: list[tuple[str, list[str]]] = []

    async def tracer(scope: Scope, receive: Receive, send: Send) -> None:
        await inner(scope, receive, send)
        seen.append((scope["endpoint"].__name__, [key for key in scope if "qwen3" in key]))

    async with scene.client(tracer) as http:
        assert (await http.post("/generate", json=STAYS)).status_code == 200
    assert seen == [("generate", [])]


class Moderation:
    """A middleware of the host's that generates itself, before it lets anybody pass."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.notes: list[str] = []

    async def __call__(self, request: Request, call_next: RequestResponseEndpoint) -> Response:
        try:
            await self.scene.engine.generate(prompt="is this allowed?", params=tokens(60))
            self.notes.append("judged")
        except ClientDisconnected:
            self.notes.append("the client has gone")
            raise
        return await call_next(request)


@pytest.mark.parametrize("outside", [True, False])
async def test_what_a_middleware_generates_is_watched_only_behind_ours(
    scene: Scene, outside: bool
) -> None:
    """The one thing that does not work when ours is not the outermost."""
    moderation = Moderation(scene)
    theirs = Middleware(BaseHTTPMiddleware, dispatch=moderation)
    app = build(scene.stage, stack=[OURS, theirs] if outside else [theirs, OURS])

    async with scene.client(app) as http:
        async with anyio.create_task_group() as group:
            group.start_soon(lambda: http.post("/generate", json=LEAVER))
            await scene.gate.held(1)
            group.cancel_scope.cancel()
        steps = scene.gate.arrived
        if outside:
            await scene.until(lambda: moderation.notes)
            scene.gate.open()
            await settle(scene.engine)
            assert moderation.notes == ["the client has gone"]
            assert scene.stage.executor.plans == steps
        else:
            for _ in range(20):
                await scene.step()
            assert scene.engine.load().num_running == 1
            assert moderation.notes == []
            scene.gate.open()
    await settle(scene.engine)
    if not outside:  # it has judged to the end; the endpoint behind it is dropped as it begins
        assert moderation.notes == ["judged"]
        assert not scene.stage.endings["finished"]
    scene.nobody_complained()
