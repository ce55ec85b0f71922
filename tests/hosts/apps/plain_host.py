"""An ASGI app without any framework: `scope`, `receive`, `send`, and a dispatch by path."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import anyio.to_thread

from qwen3_asgi import DisconnectMiddleware, create_app
from tests.hosts.apps.stage import Stage, params

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send


async def read_json(receive: Receive) -> dict[str, int]:
    body = b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body", False):
            asked: dict[str, int] = json.loads(body)
            return asked


async def start(send: Send, content_type: bytes) -> None:
    headers = [(b"content-type", content_type)]
    await send({"type": "http.response.start", "status": 200, "headers": headers})


async def say(send: Send, text: str, *, more: bool = False) -> None:
    await send({"type": "http.response.body", "body": text.encode(), "more_body": more})


def build(stage: Stage) -> ASGIApp:
    engine = stage.engine
    llm = create_app(engine, registry=stage.registry)

    async def own(scope: Scope, receive: Receive, send: Send) -> None:
        asked = await read_json(receive)
        how = {"prompt": asked["prompt"], "params": params(asked)}
        with stage.noting():
            match scope["path"]:
                case "/generate":
                    count = len((await engine.generate(**how)).token_ids)
                case "/sync":
                    output = await anyio.to_thread.run_sync(lambda: engine.generate_sync(**how))
                    count = len(output.token_ids)
                case _:
                    await start(send, b"text/plain")
                    async for delta in engine.stream(**how):
                        await say(send, f"data: {len(delta.token_ids)}\n", more=True)
                    await say(send, "")
                    return
        await start(send, b"application/json")
        await say(send, json.dumps({"tokens": count}))

    async def dispatch(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return  # no lifespan: the engine starts on first use
        if scope["path"].startswith("/llm/"):
            await llm({**scope, "root_path": scope.get("root_path", "") + "/llm"}, receive, send)
        else:
            await own(scope, receive, send)

    return DisconnectMiddleware(dispatch)


def make() -> ASGIApp:
    stage = Stage()
    return stage.controlled(build(stage))
