"""Follows one choice while it is generated: token batches in, visible chunks and logprobs out.

Both routes, streaming or not, read the engine through a `ChoiceOutput`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from qwen3_asgi.text.output import Chunk, OutputAssembler, starts_in_reasoning

if TYPE_CHECKING:
    from collections.abc import Sequence

    from qwen3_asgi.engine.handle import TokenBatch
    from qwen3_asgi.scheduler.events import Finish
    from qwen3_asgi.scheduler.plan import SampledToken
    from qwen3_asgi.text.tokenizer import Tokenizer


class ChoiceOutput:
    """State of one choice. `finish` is set by the last batch."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int],
        *,
        stop: Sequence[str] = (),
        split: bool = False,
        tool_calls: bool = False,
        logprobs: bool = False,
        shares_prompt: bool = False,
    ) -> None:
        self.prompt_tokens = len(prompt_ids)
        # With another choice, in whose usage the prompt is counted.
        self.shares_prompt = shares_prompt
        self.num_tokens = 0
        self.finish: Finish | None = None
        self._assembler = OutputAssembler(
            tokenizer,
            stop=stop,
            split=split,
            start_in_reasoning=split and starts_in_reasoning(prompt_ids, tokenizer),
            tool_calls=tool_calls,
        )
        self._logprobs = logprobs
        self._reported: list[SampledToken] = []

    @property
    def reasoning_tokens(self) -> int:
        return self._assembler.reasoning_tokens

    @property
    def has_logprobs(self) -> bool:
        return bool(self._reported)

    def push(self, batch: TokenBatch) -> list[Chunk]:
        """Return the text that this batch makes certain."""
        self.num_tokens += len(batch.tokens)
        tokens = batch.text_tokens
        if self._logprobs:
            self._reported.extend(tokens)
        chunks = self._assembler.push(token.token_id for token in tokens)
        if batch.finish is not None:
            self.finish = batch.finish
            chunks += self._assembler.finish()
        return chunks

    def take_logprobs(self) -> list[SampledToken]:
        """Return the tokens whose log-probabilities have not been sent yet."""
        taken, self._reported = self._reported, []
        return taken
