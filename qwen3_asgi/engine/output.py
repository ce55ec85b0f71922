"""What `generate` returns and `stream` yields: text, tokens and the reason for the end."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from qwen3_asgi.errors import EngineDead
from qwen3_asgi.text.output import OutputAssembler

if TYPE_CHECKING:
    from qwen3_asgi.config import SamplingParams
    from qwen3_asgi.engine.handle import TokenBatch
    from qwen3_asgi.scheduler.events import Finish, FinishReason
    from qwen3_asgi.scheduler.plan import SampledToken
    from qwen3_asgi.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Delta:
    """What came of output `index` since its last delta; the last one has `finish_reason`.

    `logprobs` is None unless asked for, else one entry per token.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[SampledToken, ...] | None = None
    finish_reason: FinishReason | None = None
    index: int = 0


@dataclass(frozen=True, slots=True)
class GenerationOutput:
    """One finished generation. `finish_reason` is "stop" or "length".

    With `SamplingParams(n=…)` it is the first of the outputs, and `others` are the rest. They share
    one prompt, computed once: `prompt_tokens` is that of all together, and for the others
    `cached_tokens` is what they took over from the first.
    """

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    prompt_tokens: int
    cached_tokens: int
    stop_reason: int | str | None = None
    logprobs: tuple[SampledToken, ...] | None = None
    index: int = 0
    others: tuple[GenerationOutput, ...] = ()

    @property
    def outputs(self) -> tuple[GenerationOutput, ...]:
        """All `n` of them, in order."""
        return (self, *self.others)


class Collector:
    """Turns one request's token batches into deltas, and in the end into its whole outputs."""

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self._params = params
        self._choices = [
            _Choice(OutputAssembler(tokenizer, stop=params.stop)) for _ in range(params.n)
        ]

    def add(self, batch: TokenBatch) -> Delta:
        choice = self._choices[batch.choice]
        chunks = choice.assembler.push(token.token_id for token in batch.text_tokens)
        if batch.finish is not None:
            chunks += choice.assembler.finish()
            choice.finish = batch.finish
        text = "".join(chunk.text for chunk in chunks)
        choice.text.append(text)
        choice.tokens += batch.tokens
        return Delta(
            text=text,
            token_ids=tuple(token.token_id for token in batch.tokens),
            logprobs=self._logprobs(batch.tokens),
            finish_reason=None if batch.finish is None else batch.finish.reason,
            index=batch.choice,
        )

    def output(self, request_id: str) -> GenerationOutput:
        """The first output, with the others in it; after the last batch."""
        first, *others = [self._output(request_id, index) for index in range(len(self._choices))]
        return replace(first, others=tuple(others))

    def _output(self, request_id: str, index: int) -> GenerationOutput:
        choice = self._choices[index]
        finish = choice.finish
        if finish is None:  # unreachable: reading ends with every finish, or raises
            raise EngineDead("the token stream ended without a terminal event")
        return GenerationOutput(
            request_id=request_id,
            text="".join(choice.text),
            token_ids=tuple(token.token_id for token in choice.tokens),
            finish_reason=finish.reason,
            prompt_tokens=finish.prompt_tokens,
            cached_tokens=finish.cached_tokens,
            stop_reason=finish.stop_reason,
            logprobs=self._logprobs(tuple(choice.tokens)),
            index=index,
        )

    def _logprobs(self, tokens: tuple[SampledToken, ...]) -> tuple[SampledToken, ...] | None:
        return None if self._params.logprobs is None else tokens


@dataclass(slots=True)
class _Choice:
    """What has come of one output."""

    assembler: OutputAssembler
    text: list[str] = field(default_factory=list)
    tokens: list[SampledToken] = field(default_factory=list)
    finish: Finish | None = None
