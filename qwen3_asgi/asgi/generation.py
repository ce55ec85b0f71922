"""The two generation routes: read, parse, submit, then answer with a body or a stream of events.

A refusal keeps its status code because a stream's headers are sent only after every submission was
accepted. Whatever way a route is left, its requests are cancelled in the scheduler.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import partial
from typing import TYPE_CHECKING, TypedDict, TypeVar

from qwen3_asgi.asgi.body import read_body
from qwen3_asgi.asgi.errors import error_reply, logger, send_error
from qwen3_asgi.asgi.responses import send_json
from qwen3_asgi.asgi.sse import DONE, json_event
from qwen3_asgi.asgi.streaming import EventStream, run_together
from qwen3_asgi.errors import ClientDisconnected, InvalidRequest, Qwen3Error
from qwen3_asgi.openai.chat import ChatReply
from qwen3_asgi.openai.completions import CompletionReply
from qwen3_asgi.openai.parsing import parse_request
from qwen3_asgi.openai.requests import (
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    check_priority,
    choose_adapter,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from starlette.types import Receive, Scope, Send

    from qwen3_asgi.asgi.serving import Handle, ServingEngine
    from qwen3_asgi.config import SamplingParams


class Asked(TypedDict):
    """The arguments of `ServingEngine.submit` that do not say what to continue."""

    params: SamplingParams
    cache_salt: str
    adapter: str | None
    timeout: float | None
    priority: int


AnyRequest = TypeVar("AnyRequest", bound=GenerationRequest)
# Below this, parsing costs less than the way to a thread and back.
_PARSE_ON_LOOP_BYTES = 64 * 1024


class GenerationRoute(ABC):
    """What both routes share. Subclasses are ASGI apps, one per mounted app."""

    def __init__(
        self,
        engine: ServingEngine,
        *,
        max_body_bytes: int,
        keep_alive_seconds: float,
        allow_priority: bool,
    ) -> None:
        self._engine = engine
        self._allow_priority = allow_priority
        self._max_body_bytes = max_body_bytes
        self._keep_alive_seconds = keep_alive_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            body = await read_body(scope, receive, self._max_body_bytes)
            await self._answer(body, send)
        except ClientDisconnected:
            raise
        except Qwen3Error as error:
            # Only failures before the response has started get here; see `_stream`.
            await send_error(send, error)

    @abstractmethod
    async def _answer(self, body: bytes, send: Send) -> None:
        """Answer one request, or raise before the response has started."""

    async def _parse(self, body: bytes, model: type[AnyRequest]) -> AnyRequest:
        if len(body) <= _PARSE_ON_LOOP_BYTES:
            request = parse_request(body, model)
        else:
            request = await self._engine.offload(parse_request, body, model)
        return request

    def _asked(self, request: GenerationRequest, params: SamplingParams) -> Asked:
        """The arguments of `submit` that both routes have."""
        adapters = [info.name for info in self._engine.adapters()]
        return {
            "params": params,
            "cache_salt": request.cache_salt or "",
            "adapter": choose_adapter(request.model, self._engine.model_name, adapters),
            "timeout": request.timeout,
            "priority": check_priority(request.priority, allowed=self._allow_priority),
        }

    async def _reply(
        self,
        request: GenerationRequest,
        handles: Sequence[Handle],
        reply: ChatReply | CompletionReply,
        send: Send,
    ) -> None:
        """Read every handle to its end and answer; each has `n` choices."""
        if request.stream:
            await self._stream(request, handles, reply, send)
            return

        async def read(index: int, handle: Handle) -> None:
            async for batch in handle:
                reply.push(index * request.choices + batch.choice, batch)

        await run_together([partial(read, i, handle) for i, handle in enumerate(handles)])
        await send_json(send, reply.body())

    async def _stream(
        self,
        request: GenerationRequest,
        handles: Sequence[Handle],
        reply: ChatReply | CompletionReply,
        send: Send,
    ) -> None:
        events = EventStream(send, keep_alive_seconds=self._keep_alive_seconds)

        async def read(index: int, handle: Handle) -> None:
            async for batch in handle:
                chunks = reply.stream(index * request.choices + batch.choice, batch)
                await events.send_frames([json_event(chunk) for chunk in chunks])

        async def produce() -> None:
            try:
                await run_together([partial(read, i, handle) for i, handle in enumerate(handles)])
            except (ClientDisconnected, OSError):
                raise
            except Exception as error:
                # The status line is gone; clients look for this frame, and for [DONE] not coming.
                await events.end(json_event(error_reply(error).body))
                if not isinstance(error, Qwen3Error):
                    raise
                logger.warning("a stream ended by an error: %s", error)
                return
            closing = [json_event(reply.usage_chunk())] if request.include_usage else []
            await events.end(b"".join([*closing, DONE]))

        await events.run(produce)


class ChatCompletions(GenerationRoute):
    """`POST /v1/chat/completions`."""

    async def _answer(self, body: bytes, send: Send) -> None:
        request = await self._parse(body, ChatRequest)
        asked = self._asked(request, request.sampling())
        handle = await self._engine.submit(
            messages=request.messages,
            tools=request.offered_tools,
            enable_thinking=request.thinking,
            **asked,
        )
        try:
            reply = ChatReply(request, self._engine.tokenizer, handle.prompt_token_ids)
            await self._reply(request, [handle], reply, send)
        finally:
            handle.cancel()


class Completions(GenerationRoute):
    """`POST /v1/completions`: `n` choices per prompt."""

    async def _answer(self, body: bytes, send: Send) -> None:
        request = await self._parse(body, CompletionRequest)
        asked = self._asked(request, request.sampling())
        prompts = request.prompts
        handles: list[Handle] = []
        try:
            for prompt in prompts:
                handle = await self._submit(prompt, asked)
                handles.append(handle)  # at once: a later refusal must cancel this one
            ids = [handle.prompt_token_ids for handle in handles]
            reply = CompletionReply(request, self._engine.tokenizer, prompts, ids)
            await self._reply(request, handles, reply, send)
        finally:
            for handle in handles:
                handle.cancel()

    async def _submit(self, prompt: str | list[int], asked: Asked) -> Handle:
        try:
            if isinstance(prompt, str):
                return await self._engine.submit(prompt=prompt, **asked)
            return await self._engine.submit(prompt_token_ids=prompt, **asked)
        except InvalidRequest as error:
            if error.param in ("prompt_token_ids", "messages"):  # the wire has one name for both
                error.param = "prompt"
            raise
