"""`DisconnectMiddleware` in Starlette and FastAPI apps, with clients that hang up."""

from __future__ import annotations

import gc
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel
import httpx
import pytest
from fastapi import FastAPI
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.routing import Mount, Route

from qwen3_asgi.asgi.watch import DisconnectWatch
from qwen3_asgi.errors import ClientDisconnected
from qwen3_asgi.middleware import DisconnectMiddleware
from qwen3_asgi.testing import DisconnectingASGITransport
from tests.engine.engines import (
    GUARD_SECONDS,
    LONG,
    Gate,
    executor,
    quiet,
    running,
    settle,
    tokens,
    toy_engine,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from starlette.middleware.base import RequestResponseEndpoint
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import ASGIApp

    from qwen3_asgi.engine.engine import Engine
    from qwen3_asgi.testing import FakeExecutor

pytestmark = [
    pytest.mark.anyio,
    # What trio says when Starlette's streaming response drops a generator in the middle.
    pytest.mark.filterwarnings("ignore:Async generator:ResourceWarning"),
]


class Host:
    """A host's own endpoints on an engine whose steps are held, and what their handlers noted."""

    def __init__(self, fake: FakeExecutor, gate: Gate, engine: Engine) -> None:
        self.fake = fake
        self.gate = gate
        self.engine = engine
        self.notes: list[str] = []
        self.params = LONG

    async def generate(self, request: Request) -> Response:
        try:
            output = await self.engine.generate(prompt="hello", params=self.params)
        except ClientDisconnected:
            await anyio.lowlevel.checkpoint()
            self.notes.append("rolled back")
            raise
        return PlainTextResponse(output.text)

    def generate_in_thread(self, request: Request) -> Response:
        try:
            output = self.engine.generate_sync(prompt="hello", params=self.params)
        except ClientDisconnected:
            self.notes.append("rolled back")
            raise
        return PlainTextResponse(output.text)

    async def stream(self, request: Request) -> Response:
        async def body() -> AsyncIterator[str]:
            try:
                async for delta in self.engine.stream(prompt="hello", params=self.params):
                    yield delta.text + "."
            except ClientDisconnected:
                self.notes.append("rolled back")
                raise

        return StreamingResponse(body())

    async def plain(self, request: Request) -> Response:
        return PlainTextResponse(await request.body())

    async def fails(self, request: Request) -> Response:
        await self.engine.generate(prompt="hello", params=tokens(1))
        raise LookupError("the host's own")

    async def with_background(self, request: Request) -> Response:
        async def later() -> None:
            await quiet()
            output = await self.engine.generate(prompt="later", params=tokens(30))
            self.notes.append(f"background {len(output.token_ids)}")

        await self.engine.generate(prompt="hello", params=tokens(1))
        return PlainTextResponse("done", background=BackgroundTask(later))

    async def polls(self, request: Request) -> Response:
        handle = await self.engine.submit(prompt="hello", params=self.params)
        self.notes.append("waiting")
        while not await request.is_disconnected():
            await anyio.lowlevel.checkpoint()
        self.notes.append("saw it")
        del handle
        return PlainTextResponse("")

    def app(self, middleware: Sequence[Middleware] = ()) -> Starlette:
        return Starlette(
            routes=[
                Route("/generate", self.generate, methods=["GET", "POST"]),
                Route("/thread", self.generate_in_thread),
                Route("/stream", self.stream),
                Route("/plain", self.plain, methods=["GET", "POST"]),
                Route("/fails", self.fails),
                Route("/background", self.with_background),
                Route("/polls", self.polls),
            ],
            middleware=list(middleware),
        )

    async def gone(self, *, steps: int) -> None:
        """Nothing is held any more, and the step that was running was the last."""
        self.gate.allow(1)
        await settle(self.engine)
        assert self.fake.plans <= steps
        self.gate.open()


@pytest.fixture
async def host() -> AsyncIterator[Host]:
    fake = executor()
    gate = Gate(fake)
    async with running(toy_engine(fake), gate) as engine:
        yield Host(fake, gate, engine)
    gc.collect()  # dropped generators here, not in the next test


@asynccontextmanager
async def client(app: ASGIApp, spec_version: str = "2.3") -> AsyncIterator[httpx.AsyncClient]:
    transport = DisconnectingASGITransport(app, spec_version=spec_version)
    with anyio.fail_after(GUARD_SECONDS):
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            yield http


async def hang_up_before_the_response(host: Host, app: ASGIApp, path: str) -> None:
    async with client(app) as http, anyio.create_task_group() as group:
        group.start_soon(http.get, path)
        await host.gate.held(1)
        group.cancel_scope.cancel()


async def hang_up_mid_stream(host: Host, app: ASGIApp, spec_version: str = "2.3") -> None:
    host.gate.allow(3)
    async with client(app, spec_version) as http, http.stream("GET", "/stream"):
        await host.gate.held(4)


PLAIN = [Middleware(DisconnectMiddleware)]
WITH_GZIP = [Middleware(DisconnectMiddleware), Middleware(GZipMiddleware, minimum_size=1)]


class Timed(BaseHTTPMiddleware):
    """What most hosts have: it passes everything on, and wants a response."""

    async def dispatch(self, request: Request, call_next: RequestResponseEndpoint) -> Response:
        response = await call_next(request)
        response.headers["x-timed"] = "yes"
        return response


@pytest.mark.parametrize("path", ["/generate", "/thread", "/stream"])
async def test_a_client_that_leaves_before_the_response_frees_the_device(
    host: Host, path: str
) -> None:
    await hang_up_before_the_response(host, host.app(PLAIN), path)
    if path != "/stream":  # Starlette's own response may be the first to end the generator there
        assert host.notes == ["rolled back"]
    await host.gone(steps=1)


@pytest.mark.parametrize("spec_version", ["2.0", "2.3", "2.4"])
async def test_a_client_that_leaves_mid_stream_frees_the_device(
    host: Host, spec_version: str
) -> None:
    await hang_up_mid_stream(host, host.app(PLAIN), spec_version)
    await host.gone(steps=4)


async def test_without_the_middleware_nobody_tells_the_handler(host: Host) -> None:
    """What the middleware is for: Starlette itself lets the handler wait for the whole output."""
    host.params = tokens(100)
    async with client(host.app()) as http:
        async with anyio.create_task_group() as group:
            group.start_soon(http.get, "/generate")
            await host.gate.held(1)
            group.cancel_scope.cancel()
        host.gate.allow(50)
        await host.gate.held(51)
        assert host.engine.load().num_running == 1
        assert host.notes == []
        host.gate.open()


@pytest.mark.parametrize("outside", [True, False])
@pytest.mark.parametrize("path", ["/generate", "/thread", "/stream"])
async def test_beside_base_http_middleware_a_disconnect_is_seen_within_a_step(
    host: Host, path: str, outside: bool
) -> None:
    stack = [Middleware(Timed), Middleware(DisconnectMiddleware)]
    await hang_up_before_the_response(host, host.app(stack if outside else stack[::-1]), path)
    await host.gone(steps=1)


@pytest.mark.parametrize("outside", [True, False])
async def test_beside_base_http_middleware_a_stream_is_freed_too(host: Host, outside: bool) -> None:
    stack = [Middleware(Timed), Middleware(DisconnectMiddleware)]
    await hang_up_mid_stream(host, host.app(stack if outside else stack[::-1]))
    await host.gone(steps=4)


async def test_behind_gzip_a_disconnect_is_seen_within_a_step(host: Host) -> None:
    await hang_up_before_the_response(host, host.app(WITH_GZIP), "/generate")
    assert host.notes == ["rolled back"]
    await host.gone(steps=1)


async def test_behind_gzip_a_stream_is_freed_too(host: Host) -> None:
    host.gate.allow(3)
    async with client(host.app(WITH_GZIP)) as http, http.stream("GET", "/stream"):
        await host.gate.held(4)
    await host.gone(steps=4)


@pytest.mark.parametrize("host_is_watched", [True, False])
@pytest.mark.parametrize("path", ["/llm/generate", "/llm/stream"])
async def test_a_mounted_app_with_its_own_watch_behind_base_http_middleware(
    host: Host, path: str, host_is_watched: bool
) -> None:
    inner = host.app([Middleware(DisconnectWatch, cancel="request")])
    stack = [Middleware(Timed)]
    if host_is_watched:
        stack.insert(0, Middleware(DisconnectMiddleware))
    app = Starlette(routes=[Mount("/llm", inner)], middleware=stack)
    await hang_up_before_the_response(host, app, path)
    await host.gone(steps=1)


async def test_a_polling_handler_still_sees_the_disconnect(host: Host) -> None:
    await hang_up_before_the_response(host, host.app(PLAIN), "/polls")
    assert host.notes == ["waiting", "saw it"]
    await host.gone(steps=1)


async def test_a_client_that_stays_gets_its_answer(host: Host) -> None:
    host.gate.open()
    host.params = tokens(100)
    async with client(host.app(WITH_GZIP)) as http:
        text = (await http.get("/generate")).text
        streamed = (await http.get("/stream")).text
        echoed = await http.post("/plain", content=b"x" * 100_000)
    assert streamed.replace(".", "") == text.replace(".", "")
    assert echoed.content == b"x" * 100_000
    await settle(host.engine)


async def test_a_background_task_outlives_the_client(host: Host) -> None:
    host.gate.open()
    async with client(host.app(PLAIN)) as http:
        assert (await http.get("/background")).text == "done"
    assert host.notes == ["background 30"]
    await settle(host.engine)


async def test_the_hosts_exceptions_reach_its_own_error_handling(host: Host) -> None:
    host.gate.open()
    async with client(host.app(PLAIN)) as http:
        with pytest.raises(LookupError, match="the host's own"):
            await http.get("/fails")


async def test_a_storm_of_clients_leaves_an_idle_engine(host: Host) -> None:
    async with client(host.app(PLAIN)) as http, anyio.create_task_group() as group:
        for path in ("/generate", "/thread", "/stream") * 10:
            group.start_soon(http.get, path)
        with anyio.fail_after(GUARD_SECONDS):
            while host.engine.load().num_running + host.engine.load().num_waiting < 1:
                await anyio.lowlevel.checkpoint()
        host.gate.allow(2)
        await host.gate.held(3)
        group.cancel_scope.cancel()
    await settle_open(host)
    follow_up = await host.engine.generate(prompt="hello", params=tokens(3))
    assert len(follow_up.token_ids) == 3


async def settle_open(host: Host) -> None:
    host.gate.open()
    await settle(host.engine)


async def test_fastapi_endpoints_async_and_sync_are_aborted(host: Host) -> None:
    app = FastAPI()

    @app.get("/async")
    async def generate() -> str:
        return (await host.engine.generate(prompt="hello", params=host.params)).text

    @app.get("/sync")
    def generate_sync() -> str:
        return host.engine.generate_sync(prompt="hello", params=host.params).text

    app.add_middleware(DisconnectMiddleware)
    await hang_up_before_the_response(host, app, "/async")
    await host.gone(steps=1)
    host.gate.hold()
    async with client(app) as http, anyio.create_task_group() as group:
        group.start_soon(http.get, "/sync")
        await host.gate.held(2)
        group.cancel_scope.cancel()
    await host.gone(steps=2)


async def test_the_request_policy_ends_a_handler_that_does_not_generate(host: Host) -> None:
    started = anyio.Event()
    ended = []

    async def sleeps(request: Request) -> Response:
        started.set()
        try:
            await anyio.sleep_forever()
        finally:
            ended.append(request.url.path)
        raise NotImplementedError

    app = Starlette(
        routes=[Route("/sleep", sleeps)],
        middleware=[Middleware(DisconnectMiddleware, cancel="request")],
    )
    async with client(app) as http, anyio.create_task_group() as group:
        group.start_soon(http.get, "/sleep")
        await started.wait()
        group.cancel_scope.cancel()
    assert ended == ["/sleep"]
