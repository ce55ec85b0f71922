"""Builds `chat.completion` replies and their chunks from one choice's token batches."""

from __future__ import annotations

import time
import uuid
from typing import TYPE_CHECKING, Any

from qwen3_asgi.openai.choice import Batch, ChoiceOutput
from qwen3_asgi.openai.logprobs import chat_logprobs
from qwen3_asgi.openai.usage import usage
from qwen3_asgi.text.tool_calls import parse_tool_call

if TYPE_CHECKING:
    from collections.abc import Sequence

    from qwen3_asgi.openai.requests import ChatRequest
    from qwen3_asgi.text.tokenizer import Tokenizer


class ChatReply:
    """One reply. Feed it every batch: through `push` for a body, through `stream` for chunks."""

    def __init__(
        self, request: ChatRequest, tokenizer: Tokenizer, prompt_ids: Sequence[int]
    ) -> None:
        self._request = request
        self._tokenizer = tokenizer
        self._id = f"chatcmpl-{uuid.uuid4().hex}"
        self._created = int(time.time())
        output = ChoiceOutput(
            tokenizer,
            prompt_ids,
            stop=request.stop_strings,
            split=True,
            tool_calls=request.offered_tools is not None,
            logprobs=bool(request.logprobs),
        )
        self._outputs = [output]
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[dict[str, Any]] = []
        self._role_sent = False

    def push(self, index: int, batch: Batch) -> None:
        """Take a batch of choice `index` (a chat has choice 0 only) and keep it for `body`."""
        for section, text in self._outputs[index].push(batch):
            if section == "content":
                self._content.append(text)
            elif section == "reasoning":
                self._reasoning.append(text)
            else:
                self._calls.append(_tool_call(text))

    def body(self) -> dict[str, Any]:
        """Return the whole reply, after the last batch."""
        content = "".join(self._content)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": None if self._calls and not content else content,
            "refusal": None,
        }
        if self._reasoning:
            message |= _reasoning("".join(self._reasoning))
        if self._calls:
            message["tool_calls"] = self._calls
        choice = {
            "index": 0,
            "message": message,
            "logprobs": self._logprobs(),
            "finish_reason": self._finish_reason(),
        }
        return {
            **self._envelope("chat.completion"),
            "choices": [choice],
            "usage": usage(self._outputs, reasoning=True),
        }

    def stream(self, index: int, batch: Batch) -> list[dict[str, Any]]:
        """Take a batch; return the chunks to send for it, the closing one with the last batch."""
        deltas: list[dict[str, Any]] = []
        if not self._role_sent:
            deltas.append({"role": "assistant", "content": ""})
            self._role_sent = True
        for section, text in self._outputs[index].push(batch):
            if section == "content":
                deltas.append({"content": text})
            elif section == "reasoning":
                deltas.append(_reasoning(text))
            else:
                call = _tool_call(text)
                deltas.append({"tool_calls": [{"index": len(self._calls), **call}]})
                self._calls.append(call)
        chunks = [self._chunk(delta) for delta in deltas]
        if batch.finish is not None:
            chunks.append(self._chunk({}, self._finish_reason()))
        # The batch's logprobs go with its first text. Where all of it is held back (it may become
        # a stop string), they wait for the next chunk.
        bearer = next((c for c in chunks if "role" not in c["choices"][0]["delta"]), None)
        if bearer is not None and self._outputs[0].has_logprobs:
            bearer["choices"][0]["logprobs"] = self._logprobs()
        return chunks

    def usage_chunk(self) -> dict[str, Any]:
        """Return the last chunk of a stream with `include_usage`."""
        return {
            **self._envelope("chat.completion.chunk"),
            "choices": [],
            "usage": usage(self._outputs, reasoning=True),
        }

    def _chunk(self, delta: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
        chunk = self._envelope("chat.completion.chunk")
        chunk["choices"] = [
            {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        ]
        if self._request.continuous_usage:
            chunk["usage"] = usage(self._outputs, reasoning=True)
        elif self._request.include_usage:
            chunk["usage"] = None
        return chunk

    def _envelope(self, kind: str) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._request.model,
            "system_fingerprint": None,
        }

    def _logprobs(self) -> dict[str, Any] | None:
        if not self._request.logprobs:
            return None
        tokens = self._outputs[0].take_logprobs()
        return chat_logprobs(tokens, self._tokenizer, self._request.top_logprobs or 0)

    def _finish_reason(self) -> str:
        finish = self._outputs[0].finish
        reason = "length" if finish is not None and finish.reason == "length" else "stop"
        return "tool_calls" if self._calls and reason == "stop" else reason


def _reasoning(text: str) -> dict[str, str]:
    """Both names in use: vLLM's and SGLang's."""
    return {"reasoning": text, "reasoning_content": text}


def _tool_call(text: str) -> dict[str, Any]:
    call = parse_tool_call(text)
    if call is None:
        raise AssertionError("the output assembler lets only calls that parse through")
    return {
        "id": f"call_{uuid.uuid4().hex[:24]}",
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }
