"""The app that the matrix's servers run, and what it writes down about each request.

A test names its request by `?tag=…` and reads from `/stage/state` what the server has told the app
about it, on another connection.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.routing import Mount, Route

from qwen3_asgi import DisconnectMiddleware, SamplingParams, create_app
from tests.hosts.apps.stage import Stage

if TYPE_CHECKING:
    from starlette.responses import Response
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from qwen3_asgi.scheduler.plan import StepPlan

STEP_SECONDS = 0.005
TOKENS = 40
# What `/unwatched` sends before and after the client's half has closed.
FIRST, REST = b"the first half, ", b"the rest"


class SteppedStage(Stage):
    """A stage that holds a step named beforehand, so that no test races with the engine."""

    def __init__(self) -> None:
        super().__init__()
        self._hold_at = 0
        self._first_row_after = 0

    @property
    def held(self) -> bool:
        return self.gate.arrived >= self._hold_at

    def arm(self, steps: int) -> None:
        """Hold the step that is this many after the last one; nothing may be running now."""
        self._hold_at = self.gate.arrived + steps
        self.gate.hold()
        self.gate.allow(steps - 1)

    def release(self) -> None:
        self._first_row_after = len(self.executor.rows)
        super().release()

    def rows_after(self) -> dict[str, int]:
        """How often each generation was in a step that began after the last release."""
        rows = self.executor.rows[self._first_row_after :]
        return dict(Counter(str(row.request_id) for row in rows))

    def _pace(self, plan: StepPlan) -> None:
        del plan
        time.sleep(STEP_SECONDS)


@dataclass
class Call:
    """One request as the app sees it. Times are of the monotonic clock, the same everywhere."""

    spec_version: str | None
    received: list[str] = field(default_factory=list)
    disconnected_at: float | None = None
    completed_at: float | None = None
    send_error: str | None = None
    ended: str | None = None


class Journal:
    """ASGI middleware outside of everything: notes and changes nothing."""

    def __init__(self, app: ASGIApp, stage: SteppedStage, *, has_lifespan: bool = True) -> None:
        self.app = app
        self.stage = stage
        self.has_lifespan = has_lifespan
        self.calls: dict[str, Call] = {}
        self.lifespan = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith("/stage/"):
            await self._control(Request(scope, receive))(scope, receive, send)
            return
        if scope["type"] == "lifespan":
            if not self.has_lifespan:
                raise RuntimeError("a host without a lifespan")
            self.lifespan = True
        tags = parse_qs(scope.get("query_string", b"").decode()).get("tag")
        if tags is None:
            await self.app(scope, receive, send)
        else:
            call = Call(scope["asgi"].get("spec_version"))
            self.calls[tags[0]] = call
            await self._run(call, scope, receive, send)

    async def _run(self, call: Call, scope: Scope, receive: Receive, send: Send) -> None:
        async def noted_receive() -> Message:
            message = await receive()
            call.received.append(message["type"])
            if message["type"] == "http.disconnect" and call.disconnected_at is None:
                call.disconnected_at = time.monotonic()
            return message

        async def noted_send(message: Message) -> None:
            try:
                await send(message)
            except Exception as error:
                call.send_error = type(error).__name__
                raise
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                call.completed_at = time.monotonic()

        try:
            await self.app(scope, noted_receive, noted_send)
        except BaseException as error:
            call.ended = type(error).__name__
            raise
        call.ended = "returned"

    def _control(self, request: Request) -> Response:
        match request.url.path.removeprefix("/stage/"):
            case "arm":
                self.stage.arm(int(request.query_params["steps"]))
            case "release":
                self.stage.release()
        return JSONResponse(self._state(self.calls.get(request.query_params.get("of", ""))))

    def _state(self, call: Call | None) -> dict[str, Any]:
        stage = self.stage
        load = stage.engine.load()
        return {
            "steps": stage.executor.plans,
            "held": stage.held,
            "rows_after": stage.rows_after(),
            "live": load.num_running + load.num_waiting,
            "used_blocks": load.kv_used_blocks,
            "engine": stage.engine.state,
            "endings": dict(stage.endings),
            "lifespan": self.lifespan,
            "call": call and asdict(call),
            "counters": {
                name: self._counted(f"qwen3_asgi_{family}_total")
                for name, family in (
                    ("wasted", "wasted_tokens"),
                    ("cancelled", "requests_cancelled"),
                )
            },
        }

    def _counted(self, name: str) -> int:
        return sum(
            int(sample.value)
            for family in self.stage.registry.collect()
            for sample in family.samples
            if sample.name == name
        )


def build(stage: SteppedStage) -> ASGIApp:
    engine = stage.engine

    async def early(request: Request) -> Response:
        """Starts to generate when the first part of the body is there."""
        await request.receive()
        with stage.noting():
            output = await engine.generate(prompt="early", params=SamplingParams(max_tokens=TOKENS))
        return JSONResponse({"tokens": len(output.token_ids)})

    async def background(request: Request) -> Response:
        """Answers at once and generates afterwards."""
        await request.body()

        async def work() -> None:
            with stage.noting():
                await engine.generate(prompt="later", params=SamplingParams(max_tokens=TOKENS))

        return PlainTextResponse("done", background=BackgroundTask(work))

    return Starlette(
        routes=[
            Route("/early", early, methods=["POST"]),
            Route("/background", background, methods=["POST"]),
            Mount("/unwatched", goes_on),
            Mount("/llm", create_app(engine, registry=stage.registry)),
        ],
        middleware=[Middleware(DisconnectMiddleware)],
        lifespan=engine.lifespan,
    )


async def goes_on(scope: Scope, receive: Receive, send: Send) -> None:
    """Sends the rest of its answer after it was told that the client has gone."""
    while (await receive()).get("more_body", False):
        pass
    length = str(len(FIRST) + len(REST)).encode()
    headers = [(b"content-length", length)]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": FIRST, "more_body": True})
    while (await receive())["type"] != "http.disconnect":
        pass
    await send({"type": "http.response.body", "body": REST})


def make() -> ASGIApp:
    stage = SteppedStage()
    return Journal(build(stage), stage)


def make_without_lifespan() -> ASGIApp:
    """As a plain ASGI host that refuses the protocol: the engine is left to its first use."""
    stage = SteppedStage()
    return Journal(build(stage), stage, has_lifespan=False)


def __getattr__(name: str) -> ASGIApp:
    """`app`, made when a server asks for it: daphne can't call a factory."""
    if name == "app":
        return make()
    raise AttributeError(name)
