"""Builds `text_completion` replies and their chunks: `n` choices per prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from qwen3_asgi.openai.choice import ChoiceOutput
from qwen3_asgi.openai.logprobs import CompletionLogprobs
from qwen3_asgi.openai.reply import Reply

if TYPE_CHECKING:
    from collections.abc import Sequence

    from qwen3_asgi.engine.handle import TokenBatch
    from qwen3_asgi.openai.requests import CompletionRequest
    from qwen3_asgi.text.tokenizer import Tokenizer


class CompletionReply(Reply):
    """One reply: the choices of the first prompt, then those of the second, and so on.

    `prompts` and `prompt_ids` have one entry per prompt. Choices may be fed in any interleaving.
    """

    _id_prefix = "cmpl"
    _kind = _chunk_kind = "text_completion"
    _counts_reasoning = False

    def __init__(
        self,
        request: CompletionRequest,
        tokenizer: Tokenizer,
        prompts: Sequence[str | list[int]],
        prompt_ids: Sequence[Sequence[int]],
    ) -> None:
        outputs = [
            ChoiceOutput(
                tokenizer,
                ids,
                stop=request.stop_strings,
                logprobs=request.logprobs is not None,
                shares_prompt=choice > 0,
            )
            for ids in prompt_ids
            for choice in range(request.choices)
        ]
        super().__init__(request, outputs)
        self._request = request
        num_top = request.logprobs or 0
        self._logprobs = [CompletionLogprobs(tokenizer, num_top) for _ in outputs]
        # What is to be echoed and has not been yet.
        echoes = [_echoed(p, tokenizer) if request.echo else "" for p in prompts]
        self._echo = [echo for echo in echoes for _ in range(request.choices)]
        self._texts: list[list[str]] = [[] for _ in outputs]

    def push(self, index: int, batch: TokenBatch) -> None:
        """Take a choice's batch and keep its text for `body`."""
        self._texts[index].append(self._text(index, batch))

    def body(self) -> dict[str, Any]:
        """Return the whole reply, after every choice's last batch."""
        choices = [
            self._choice(i, "".join(texts), self._take_logprobs(i), self._finish_reason(i))
            for i, texts in enumerate(self._texts)
        ]
        return self._whole(choices)

    def stream(self, index: int, batch: TokenBatch) -> list[dict[str, Any]]:
        """Take a choice's batch; return the chunks to send for it."""
        text = self._text(index, batch)
        chunks: list[dict[str, Any]] = []
        if text:
            chunks.append(self._chunk(index, text, None))
        if batch.finish is not None:
            chunks.append(self._chunk(index, "", self._finish_reason(index)))
        return chunks

    def _text(self, index: int, batch: TokenBatch) -> str:
        echo, self._echo[index] = self._echo[index], ""
        return echo + "".join(chunk.text for chunk in self._outputs[index].push(batch))

    def _chunk(self, index: int, text: str, finish_reason: str | None) -> dict[str, Any]:
        logprobs = self._take_logprobs(index) if self._outputs[index].has_logprobs else None
        return self._chunk_of(self._choice(index, text, logprobs, finish_reason))

    def _choice(
        self, index: int, text: str, logprobs: dict[str, Any] | None, finish_reason: str | None
    ) -> dict[str, Any]:
        return {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }

    def _take_logprobs(self, index: int) -> dict[str, Any] | None:
        if self._request.logprobs is None:
            return None
        return self._logprobs[index].build(self._outputs[index].take_logprobs())


def _echoed(prompt: str | list[int], tokenizer: Tokenizer) -> str:
    if isinstance(prompt, str):
        return prompt
    return tokenizer.decode(prompt, skip_special_tokens=False)
