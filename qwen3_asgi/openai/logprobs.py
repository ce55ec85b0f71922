"""Log-probabilities in OpenAI's two shapes: an entry per token (chat), or lists (completions)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from qwen3_asgi.text.detokenize import Detokenizer

if TYPE_CHECKING:
    from collections.abc import Iterable

    from qwen3_asgi.scheduler.plan import SampledToken
    from qwen3_asgi.text.tokenizer import Tokenizer

# OpenAI's value for "very unlikely"; JSON has no -inf.
_UNLIKELY = -9999.0


def chat_logprobs(
    tokens: Iterable[SampledToken], tokenizer: Tokenizer, num_top: int
) -> dict[str, Any]:
    """Return a chat choice's `logprobs`."""
    content = [
        {
            **_entry(token.token_id, token.logprob, tokenizer),
            "top_logprobs": [
                _entry(token_id, logprob, tokenizer)
                for token_id, logprob in token.top_logprobs[:num_top]
            ],
        }
        for token in tokens
    ]
    return {"content": content, "refusal": None}


class CompletionLogprobs:
    """Builds `logprobs` of a completion choice; remembers the text offset between chunks."""

    def __init__(self, tokenizer: Tokenizer, num_top: int) -> None:
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._detokenizer = Detokenizer(tokenizer)
        self._offset = 0

    def build(self, tokens: Iterable[SampledToken]) -> dict[str, Any]:
        names: list[str] = []
        logprobs: list[float] = []
        top: list[dict[str, float]] = []
        offsets: list[int] = []
        for token in tokens:
            name = _name(token.token_id, self._tokenizer)
            names.append(name)
            logprobs.append(_finite(token.logprob))
            # The chosen token is always among the alternatives, as OpenAI has it.
            alternatives = token.top_logprobs[: self._num_top]
            best = {_name(i, self._tokenizer): _finite(value) for i, value in alternatives}
            best.setdefault(name, _finite(token.logprob))
            top.append(best)
            offsets.append(self._offset)
            self._offset += len(self._detokenizer.push(token.token_id))
        return {
            "tokens": names,
            "token_logprobs": logprobs,
            "top_logprobs": top if self._num_top else None,
            "text_offset": offsets,
        }


def _entry(token_id: int, logprob: float | None, tokenizer: Tokenizer) -> dict[str, Any]:
    data = tokenizer.token_bytes(token_id)
    return {
        "token": data.decode("utf-8", "replace"),
        "logprob": _finite(logprob),
        "bytes": list(data),
    }


def _name(token_id: int, tokenizer: Tokenizer) -> str:
    """The token's text; part of a character is written out, so that names stay distinct."""
    data = tokenizer.token_bytes(token_id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _finite(logprob: float | None) -> float:
    return logprob if logprob is not None and math.isfinite(logprob) else _UNLIKELY
