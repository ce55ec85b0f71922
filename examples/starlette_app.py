"""A Starlette app with a Qwen3 engine inside.

Run it from the repository's root and try it:

    uvicorn examples.starlette_app:app
    curl localhost:8000/ask -d '{"question": "What is the capital of France?"}'
    curl -N 'localhost:8000/story?tokens=100'
    curl localhost:8000/llm/v1/models
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Mount, Route

from qwen3_asgi import DisconnectMiddleware, Engine, SamplingParams, create_app

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from starlette.requests import Request

# "tiny" is in the package; a folder or a hub id such as "Qwen/Qwen3-0.6B" works as well.
# This line loads nothing yet: the app's lifespan does.
engine = Engine(os.environ.get("QWEN3_MODEL", "tiny"))


async def ask(request: Request) -> JSONResponse:
    question = (await request.json())["question"]
    output = await engine.generate(
        messages=[{"role": "user", "content": question}],
        params=SamplingParams(max_tokens=200, temperature=0),
        enable_thinking=False,
    )
    return JSONResponse({"answer": output.text, "tokens": len(output.token_ids)})


async def story(request: Request) -> StreamingResponse:
    tokens = int(request.query_params.get("tokens", "100"))

    async def text() -> AsyncIterator[str]:
        # When the client leaves, this generator is left too, and with it the generation.
        params = SamplingParams(max_tokens=tokens, ignore_eos=True)
        async for delta in engine.stream(prompt="Once upon a time", params=params):
            yield delta.text

    return StreamingResponse(text(), media_type="text/plain; charset=utf-8")


app = Starlette(
    lifespan=engine.lifespan,
    routes=[
        Route("/ask", ask, methods=["POST"]),
        Route("/story", story),
        Mount("/llm", create_app(engine)),  # OpenAI's routes: /llm/v1/chat/completions, …
    ],
    # First in the list is outermost. It sees the client leave, whatever is below it.
    middleware=[Middleware(DisconnectMiddleware)],
)
