"""Builds `chat.completion` replies and their chunks from one choice's token batches."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any

from qwen3_asgi.openai.choice import ChoiceOutput
from qwen3_asgi.openai.logprobs import chat_logprobs
from qwen3_asgi.openai.reply import Reply
from qwen3_asgi.text.tool_calls import parse_tool_call

if TYPE_CHECKING:
    from collections.abc import Sequence

    from qwen3_asgi.engine.handle import TokenBatch
    from qwen3_asgi.openai.requests import ChatRequest
    from qwen3_asgi.text.tokenizer import Tokenizer


class ChatReply(Reply):
    """One reply. Feed it every batch: through `push` for a body, through `stream` for chunks."""

    _id_prefix = "chatcmpl"
    _kind = "chat.completion"
    _chunk_kind = "chat.completion.chunk"
    _counts_reasoning = True

    def __init__(
        self, request: ChatRequest, tokenizer: Tokenizer, prompt_ids: Sequence[int]
    ) -> None:
        output = ChoiceOutput(
            tokenizer,
            prompt_ids,
            stop=request.stop_strings,
            split=True,
            tool_calls=request.offered_tools is not None,
            logprobs=bool(request.logprobs),
        )
        super().__init__(request, [output])
        self._request = request
        self._tokenizer = tokenizer
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[dict[str, Any]] = []
        self._role_sent = False

    def push(self, index: int, batch: TokenBatch) -> None:
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
            "finish_reason": self._finish_reason(0),
        }
        return self._whole([choice])

    def stream(self, index: int, batch: TokenBatch) -> list[dict[str, Any]]:
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
            chunks.append(self._chunk({}, self._finish_reason(0)))
        # The batch's logprobs go with its first text. Where all of it is held back (it may become
        # a stop string), they wait for the next chunk.
        bearer = next((c for c in chunks if "role" not in c["choices"][0]["delta"]), None)
        if bearer is not None and self._outputs[0].has_logprobs:
            bearer["choices"][0]["logprobs"] = self._logprobs()
        return chunks

    def _chunk(self, delta: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
        return self._chunk_of(
            {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        )

    def _logprobs(self) -> dict[str, Any] | None:
        if not self._request.logprobs:
            return None
        tokens = self._outputs[0].take_logprobs()
        return chat_logprobs(tokens, self._tokenizer, self._request.top_logprobs or 0)

    def _finish_reason(self, index: int) -> str:
        reason = super()._finish_reason(index)
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
