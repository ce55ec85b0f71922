"""A FastAPI app with a Qwen3 engine inside, and one registry for its metrics and the engine's.

Run it from the repository's root and try it:

    uvicorn examples.fastapi_app:app
    curl localhost:8000/ask -H 'content-type: application/json' \\
        -d '{"question": "What is the capital of France?"}'
    curl -N 'localhost:8000/story?tokens=100'
    curl localhost:8000/metrics
"""

import os
from collections.abc import AsyncIterator

from fastapi import FastAPI, Request
from fastapi.responses import Response, StreamingResponse
from prometheus_client import CollectorRegistry, Counter
from pydantic import BaseModel

from qwen3_asgi import DisconnectMiddleware, Engine, SamplingParams, create_app
from qwen3_asgi.metrics import render

engine = Engine(os.environ.get("QWEN3_MODEL", "tiny"))  # loads nothing yet: the lifespan does
registry = CollectorRegistry()
questions = Counter("questions", "Questions asked.", registry=registry)

app = FastAPI(lifespan=engine.lifespan)
app.mount("/llm", create_app(engine, registry=registry))  # OpenAI's routes, for any client
app.add_middleware(DisconnectMiddleware)  # add it last: the last one added is the outermost


class Question(BaseModel):
    question: str


class Answer(BaseModel):
    answer: str
    tokens: int


PARAMS = SamplingParams(max_tokens=200, temperature=0)


@app.post("/ask")
async def ask(asked: Question) -> Answer:
    questions.inc()
    messages = [{"role": "user", "content": asked.question}]
    output = await engine.generate(messages=messages, params=PARAMS, enable_thinking=False)
    return Answer(answer=output.text, tokens=len(output.token_ids))


@app.post("/ask-sync")
def ask_in_a_thread(asked: Question) -> Answer:
    """FastAPI runs a `def` endpoint in a thread; a disconnect reaches it there as well."""
    questions.inc()
    messages = [{"role": "user", "content": asked.question}]
    output = engine.generate_sync(messages=messages, params=PARAMS, enable_thinking=False)
    return Answer(answer=output.text, tokens=len(output.token_ids))


@app.get("/story")
async def story(tokens: int = 100) -> StreamingResponse:
    async def text() -> AsyncIterator[str]:
        params = SamplingParams(max_tokens=tokens, ignore_eos=True)
        async for delta in engine.stream(prompt="Once upon a time", params=params):
            yield delta.text

    return StreamingResponse(text(), media_type="text/plain; charset=utf-8")


@app.get("/metrics")
def metrics(request: Request) -> Response:
    body, content_type = render(registry, request.headers.get("accept"))
    return Response(body, headers={"content-type": content_type})
