"""Builds `chat.completion` replies and their chunks from the token batches of their choices."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
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
        outputs = [
            ChoiceOutput(
                tokenizer,
                prompt_ids,
                stop=request.stop_strings,
                split=True,
                tool_calls=request.offered_tools is not None,
                logprobs=bool(request.logprobs),
                shares_prompt=choice > 0,
            )
            for choice in range(request.choices)
        ]
        super().__init__(request, outputs)
        self._request = request
        self._tokenizer = tokenizer
        self._said = [_Said() for _ in outputs]

    def push(self, index: int, batch: TokenBatch) -> None:
        """Take a batch of choice `index` and keep it for `body`."""
        said = self._said[index]
        for section, text in self._outputs[index].push(batch):
            if section == "content":
                said.content.append(text)
            elif section == "reasoning":
                said.reasoning.append(text)
            else:
                said.calls.append(_tool_call(text))

    def body(self) -> dict[str, Any]:
        """Return the whole reply, after every choice's last batch."""
        choices = [
            {
                "index": index,
                "message": said.message(),
                "logprobs": self._logprobs(index),
                "finish_reason": self._finish_reason(index),
            }
            for index, said in enumerate(self._said)
        ]
        return self._whole(choices)

    def stream(self, index: int, batch: TokenBatch) -> list[dict[str, Any]]:
        """Take a choice's batch; return the chunks to send, the closing one with the last."""
        said = self._said[index]
        deltas: list[dict[str, Any]] = []
        if not said.role_sent:
            deltas.append({"role": "assistant", "content": ""})
            said.role_sent = True
        for section, text in self._outputs[index].push(batch):
            if section == "content":
                deltas.append({"content": text})
            elif section == "reasoning":
                deltas.append(_reasoning(text))
            else:
                call = _tool_call(text)
                deltas.append({"tool_calls": [{"index": len(said.calls), **call}]})
                said.calls.append(call)
        chunks = [self._chunk(index, delta) for delta in deltas]
        if batch.finish is not None:
            chunks.append(self._chunk(index, {}, self._finish_reason(index)))
        # The batch's logprobs go with its first text. Where all of it is held back (it may become
        # a stop string), they wait for the next chunk.
        bearer = next((c for c in chunks if "role" not in c["choices"][0]["delta"]), None)
        if bearer is not None and self._outputs[index].has_logprobs:
            bearer["choices"][0]["logprobs"] = self._logprobs(index)
        return chunks

    def _chunk(
        self, index: int, delta: dict[str, Any], finish_reason: str | None = None
    ) -> dict[str, Any]:
        return self._chunk_of(
            {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        )

    def _logprobs(self, index: int) -> dict[str, Any] | None:
        if not self._request.logprobs:
            return None
        tokens = self._outputs[index].take_logprobs()
        return chat_logprobs(tokens, self._tokenizer, self._request.top_logprobs or 0)

    def _finish_reason(self, index: int) -> str:
        reason = super()._finish_reason(index)
        return "tool_calls" if self._said[index].calls and reason == "stop" else reason


@dataclass(slots=True)
class _Said:
    """What one choice has said so far."""

    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    role_sent: bool = False

    def message(self) -> dict[str, Any]:
        content = "".join(self.content)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": None if self.calls and not content else content,
            "refusal": None,
        }
        if self.reasoning:
            message |= _reasoning("".join(self.reasoning))
        if self.calls:
            message["tool_calls"] = self.calls
        return message


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
