"""What `generate` returns and `stream` yields: text, tokens and the reason for the end."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from qwen3_asgi.text.output import OutputAssembler

if TYPE_CHECKING:
    from qwen3_asgi.config import SamplingParams
    from qwen3_asgi.engine.handle import RequestHandle, TokenBatch
    from qwen3_asgi.scheduler.events import Finish, FinishReason
    from qwen3_asgi.scheduler.plan import SampledToken
    from qwen3_asgi.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Delta:
    """What came since the last delta; the last one has `finish_reason`.

    `logprobs` is None unless asked for, else one entry per token.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[SampledToken, ...] | None = None
    finish_reason: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class GenerationOutput:
    """One finished generation. `finish_reason` is "stop" or "length"."""

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    prompt_tokens: int
    cached_tokens: int
    stop_reason: int | str | None = None
    logprobs: tuple[SampledToken, ...] | None = None


@dataclass(slots=True)
class Collector:
    """Turns one request's token batches into deltas, and in the end into the whole output."""

    tokenizer: Tokenizer
    params: SamplingParams
    _assembler: OutputAssembler = field(init=False)
    _text: list[str] = field(default_factory=list)
    _tokens: list[SampledToken] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._assembler = OutputAssembler(self.tokenizer, stop=self.params.stop)

    def add(self, batch: TokenBatch) -> Delta:
        tokens, finish = batch
        chunks = self._assembler.push(token.token_id for token in batch.text_tokens)
        if finish is not None:
            chunks += self._assembler.finish()
        text = "".join(chunk.text for chunk in chunks)
        self._text.append(text)
        self._tokens += tokens
        return Delta(
            text=text,
            token_ids=tuple(token.token_id for token in tokens),
            logprobs=self._logprobs(tokens),
            finish_reason=None if finish is None else finish.reason,
        )

    def output(self, handle: RequestHandle, finish: Finish) -> GenerationOutput:
        return GenerationOutput(
            request_id=handle.request_id,
            text="".join(self._text),
            token_ids=tuple(token.token_id for token in self._tokens),
            finish_reason=finish.reason,
            prompt_tokens=finish.prompt_tokens,
            cached_tokens=finish.cached_tokens,
            stop_reason=finish.stop_reason,
            logprobs=self._logprobs(tuple(self._tokens)),
        )

    def _logprobs(self, tokens: tuple[SampledToken, ...]) -> tuple[SampledToken, ...] | None:
        return None if self.params.logprobs is None else tokens
