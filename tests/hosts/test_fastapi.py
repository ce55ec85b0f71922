"""FastAPI's own ways around an endpoint: dependencies with `yield`, and background tasks."""

# No `from __future__ import annotations`: FastAPI resolves annotations in the module's globals,
# and the endpoints are made inside the tests.

from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from typing import Annotated

import anyio
import anyio.lowlevel
import pytest
from fastapi import BackgroundTasks, Depends, FastAPI
from fastapi.responses import StreamingResponse
from pydantic import BaseModel

from qwen3_asgi import ClientDisconnected, DisconnectMiddleware
from tests.engine.engines import LONG, settle, tokens
from tests.hosts.scene import LEAVER, Scene

pytestmark = [
    pytest.mark.anyio,
    # What trio says when a host's streaming response drops a generator in the middle.
    pytest.mark.filterwarnings("ignore:Async generator:ResourceWarning"),
]


class Asked(BaseModel):
    prompt: str
    max_tokens: int


class Host:
    """FastAPI with endpoints that depend on a session; `notes` is what became of the sessions."""

    def __init__(self, scene: Scene) -> None:
        self.engine = scene.engine
        self.stage = scene.stage
        self.notes: list[str] = []
        self.app = FastAPI()
        self.app.add_middleware(DisconnectMiddleware)

        async def session() -> AsyncIterator[str]:
            self.notes.append("open")
            try:
                yield "session"
            except BaseException as error:
                # What a database session does: another round trip, undisturbed by the disconnect.
                await anyio.lowlevel.checkpoint()
                self.notes.append(f"rolled back: {type(error).__name__}")
                raise
            else:
                self.notes.append("committed")
            finally:
                await anyio.lowlevel.checkpoint()
                self.notes.append("closed")

        def session_sync() -> Iterator[str]:
            self.notes.append("open")
            try:
                yield "session"
            except BaseException as error:
                self.notes.append(f"rolled back: {type(error).__name__}")
                raise
            else:
                self.notes.append("committed")
            finally:
                self.notes.append("closed")

        @self.app.post("/async/async")
        async def one(asked: Asked, held: Annotated[str, Depends(session)]) -> dict[str, int]:
            return await self.generate(asked)

        @self.app.post("/async/sync")
        async def two(asked: Asked, held: Annotated[str, Depends(session_sync)]) -> dict[str, int]:
            return await self.generate(asked)

        @self.app.post("/sync/async")
        def three(asked: Asked, held: Annotated[str, Depends(session)]) -> dict[str, int]:
            return self.generate_sync(asked)

        @self.app.post("/sync/sync")
        def four(asked: Asked, held: Annotated[str, Depends(session_sync)]) -> dict[str, int]:
            return self.generate_sync(asked)

        @self.app.post("/stream")
        async def five(asked: Asked, held: Annotated[str, Depends(session)]) -> StreamingResponse:
            return StreamingResponse(self.lines(asked))

    async def generate(self, asked: Asked) -> dict[str, int]:
        with self.stage.noting():
            params = tokens(asked.max_tokens)
            output = await self.engine.generate(prompt=asked.prompt, params=params)
        return {"tokens": len(output.token_ids)}

    def generate_sync(self, asked: Asked) -> dict[str, int]:
        with self.stage.noting():
            params = tokens(asked.max_tokens)
            output = self.engine.generate_sync(prompt=asked.prompt, params=params)
        return {"tokens": len(output.token_ids)}

    async def lines(self, asked: Asked) -> AsyncIterator[str]:
        params = tokens(asked.max_tokens)
        with self.stage.noting():
            async for delta in self.engine.stream(prompt=asked.prompt, params=params):
                yield f"data: {len(delta.token_ids)}\n"


@pytest.mark.parametrize("path", ["/async/async", "/async/sync", "/sync/async", "/sync/sync"])
async def test_a_dependency_sees_the_disconnect_and_cleans_up(scene: Scene, path: str) -> None:
    host = Host(scene)
    await scene.leave(host.app, path, stays="/async/async")
    assert scene.told() == {"ClientDisconnected": 1}
    assert host.notes.count("rolled back: ClientDisconnected") == 1
    assert host.notes.count("open") == host.notes.count("closed") == 3
    assert host.notes.count("committed") == 2


async def test_a_dependency_of_a_stream_is_cleaned_up_as_well(scene: Scene) -> None:
    host = Host(scene)
    await scene.leave(host.app, "/stream", mid_stream=True, stays="/async/async")
    assert sum(scene.told().values()) == 1
    assert host.notes.count("open") == host.notes.count("closed") == 3


async def test_background_tasks_run_on_after_the_answer(scene: Scene) -> None:
    """The client that has its answer hangs up; what is generated for the log is not cut short."""
    app = FastAPI()
    app.add_middleware(DisconnectMiddleware)
    notes: list[int] = []
    begun = anyio.Event()

    async def in_background(prompt: str) -> None:
        begun.set()
        output = await scene.engine.generate(prompt=prompt, params=tokens(20))
        notes.append(len(output.token_ids))

    def in_thread(prompt: str) -> None:
        output = scene.engine.generate_sync(prompt=prompt, params=tokens(30))
        notes.append(len(output.token_ids))

    @app.post("/ask")
    async def ask(asked: Asked, tasks: BackgroundTasks) -> dict[str, int]:
        tasks.add_task(in_background, "a summary")
        tasks.add_task(in_thread, "a title")
        output = await scene.engine.generate(prompt=asked.prompt, params=tokens(3))
        return {"tokens": len(output.token_ids)}

    async with scene.client(app) as http:
        scene.gate.allow(3)
        answer = await http.post("/ask", json=LEAVER)
        assert answer.json() == {"tokens": 3}
        await begun.wait()
        await scene.live(1)  # held in its first step; and the client is gone
        assert notes == []
        scene.gate.open()
    assert notes == [20, 30]
    await settle(scene.engine)
    assert scene.counted("qwen3_asgi_client_disconnects_total") == 0
    scene.nobody_complained()


async def test_background_tasks_of_an_answer_that_was_never_given_do_not_generate(
    scene: Scene,
) -> None:
    """FastAPI runs none when the endpoint raised; a stream's run, and get the same error."""
    app = FastAPI()
    app.add_middleware(DisconnectMiddleware)
    notes: list[str] = []

    async def later() -> None:
        try:
            await scene.engine.generate(prompt="a summary", params=LONG)
        except ClientDisconnected:
            notes.append("refused")
            raise

    @app.post("/generate")
    async def generate(asked: Asked, tasks: BackgroundTasks) -> dict[str, int]:
        tasks.add_task(later)
        params = tokens(asked.max_tokens)
        output = await scene.engine.generate(prompt=asked.prompt, params=params)
        tasks.tasks.clear()
        return {"tokens": len(output.token_ids)}

    await scene.leave(app, "/generate")
    assert notes == []
    assert scene.rows_of("a summary") == 0


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_dependency_that_swallows_the_disconnect_is_the_hosts_mistake(
    scene: Scene,
) -> None:
    """As with any other exception: FastAPI then has no response, and says so."""
    app = FastAPI()
    app.add_middleware(DisconnectMiddleware)

    async def swallows() -> AsyncIterator[None]:
        with suppress(ClientDisconnected):
            yield

    @app.post("/generate", dependencies=[Depends(swallows)])
    async def generate(asked: Asked) -> None:
        await scene.engine.generate(prompt=asked.prompt, params=LONG)

    async def leave() -> None:
        async with scene.client(app) as http, anyio.create_task_group() as group:
            group.start_soon(lambda: http.post("/generate", json=LEAVER))
            await scene.gate.held(1)
            group.cancel_scope.cancel()

    with pytest.raises(RuntimeError, match="dependency with yield"):
        await leave()
    scene.gate.open()
    await settle(scene.engine)
