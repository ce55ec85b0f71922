"""FastAPI WebSocket endpoints: one that waits, one that streams, one that listens meanwhile."""

# No `from __future__ import annotations`: FastAPI resolves annotations in the module's globals,
# and the endpoints are made inside `build`.

from collections.abc import AsyncIterator
from typing import Annotated, Any

import anyio
from fastapi import Depends, FastAPI, WebSocket, WebSocketDisconnect
from starlette.concurrency import run_in_threadpool
from starlette.types import ASGIApp

from qwen3_asgi import ClientDisconnected, DisconnectMiddleware, create_app
from tests.hosts.apps.stage import Stage, params


def build(stage: Stage) -> ASGIApp:
    engine = stage.engine
    app = FastAPI(lifespan=engine.lifespan)
    app.mount("/llm", create_app(engine, registry=stage.registry))
    app.add_middleware(DisconnectMiddleware)

    async def session() -> AsyncIterator[str]:
        stage.endings["opened"] += 1
        try:
            yield "a database session"
        finally:
            await anyio.lowlevel.checkpoint()
            stage.endings["closed"] += 1

    def asked(message: dict[str, Any]) -> dict[str, Any]:
        return {"prompt": message["prompt"], "params": params(message)}

    @app.websocket("/ws/generate")
    async def generate(websocket: WebSocket, held: Annotated[str, Depends(session)]) -> None:
        await websocket.accept()
        message = await websocket.receive_json()
        with stage.noting():
            output = await engine.generate(**asked(message))
        await websocket.send_json({"tokens": len(output.token_ids)})
        await websocket.close()

    @app.websocket("/ws/sync")
    async def in_thread(websocket: WebSocket, held: Annotated[str, Depends(session)]) -> None:
        await websocket.accept()
        message = await websocket.receive_json()

        def work() -> int:
            with stage.noting():
                return len(engine.generate_sync(**asked(message)).token_ids)

        await websocket.send_json({"tokens": await run_in_threadpool(work)})
        await websocket.close()

    @app.websocket("/ws/stream")
    async def stream(websocket: WebSocket, held: Annotated[str, Depends(session)]) -> None:
        await websocket.accept()
        message = await websocket.receive_json()
        count = 0
        try:
            with stage.noting():
                async for delta in engine.stream(**asked(message)):
                    count += len(delta.token_ids)
                    await websocket.send_json({"text": delta.text})
        except WebSocketDisconnect:  # it left while we sent
            return
        await websocket.send_json({"tokens": count})
        await websocket.close()

    @app.websocket("/ws/chat")
    async def chat(websocket: WebSocket, held: Annotated[str, Depends(session)]) -> None:
        """Turns in the order they come; the word "stop" ends the one that runs."""
        await websocket.accept()
        turn = anyio.CancelScope()

        async def answer(message: dict[str, Any]) -> None:
            with turn, stage.noting():
                output = await engine.generate(**asked(message))
                await websocket.send_json({"tokens": len(output.token_ids)})
            if turn.cancelled_caught:
                await websocket.send_json({"stopped": True})

        try:
            async with anyio.create_task_group() as turns:
                while True:
                    message = await websocket.receive_json()
                    if message == "stop":
                        turn.cancel()
                    else:
                        turn = anyio.CancelScope()
                        turns.start_soon(answer, message)
        except* WebSocketDisconnect:
            pass

    @app.websocket("/ws/before-accepting")
    async def doorkeeper(websocket: WebSocket, held: Annotated[str, Depends(session)]) -> None:
        with stage.noting():
            await engine.generate(prompt="may it come in?", params=params({"max_tokens": 3000}))
        await websocket.accept()

    @app.websocket("/ws/caught")
    async def caught(websocket: WebSocket, held: Annotated[str, Depends(session)]) -> None:
        """Cleans up and goes on; what it starts then is refused."""
        await websocket.accept()
        message = await websocket.receive_json()
        try:
            with stage.noting():
                await engine.generate(**asked(message))
        except ClientDisconnected:
            with stage.noting():
                await engine.generate(**asked(message))
        await websocket.send_json({"tokens": 0})

    return app


def make() -> ASGIApp:
    stage = Stage()
    return stage.controlled(build(stage))
