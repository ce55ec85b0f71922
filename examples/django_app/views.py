"""An async view, a sync view and a streaming one.

A view that waits for tokens gets `ClientDisconnected` when its client leaves. Answer it: Django
would log an exception of a view as an internal error. Nobody reads the response.
"""

import json
from collections.abc import AsyncIterator

from django.http import HttpRequest, HttpResponse, JsonResponse, StreamingHttpResponse
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_POST

from examples.django_app.engine import engine
from qwen3_asgi import ClientDisconnected, GenerationOutput, SamplingParams

PARAMS = SamplingParams(max_tokens=200, temperature=0)


@csrf_exempt
@require_POST
async def ask(request: HttpRequest) -> HttpResponse:
    messages = [{"role": "user", "content": json.loads(request.body)["question"]}]
    try:
        output = await engine.generate(messages=messages, params=PARAMS, enable_thinking=False)
    except ClientDisconnected:
        return HttpResponse(status=499)
    return answer(output)


@csrf_exempt
@require_POST
def ask_in_a_thread(request: HttpRequest) -> HttpResponse:
    messages = [{"role": "user", "content": json.loads(request.body)["question"]}]
    try:
        output = engine.generate_sync(messages=messages, params=PARAMS, enable_thinking=False)
    except ClientDisconnected:
        return HttpResponse(status=499)
    return answer(output)


async def story(request: HttpRequest) -> StreamingHttpResponse:
    tokens = int(request.GET.get("tokens", "100"))

    async def text() -> AsyncIterator[str]:
        params = SamplingParams(max_tokens=tokens, ignore_eos=True)
        async for delta in engine.stream(prompt="Once upon a time", params=params):
            yield delta.text

    return StreamingHttpResponse(text(), content_type="text/plain; charset=utf-8")


def answer(output: GenerationOutput) -> JsonResponse:
    return JsonResponse({"answer": output.text, "tokens": len(output.token_ids)})
