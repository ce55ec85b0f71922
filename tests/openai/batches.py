"""Token batches for tests: text in, the batches an engine would deliver out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from qwen3_asgi.engine.handle import TokenBatch
from qwen3_asgi.scheduler.events import Finish
from qwen3_asgi.scheduler.plan import SampledToken
from tests.text.toy import TAGS, byte_ids, token

if TYPE_CHECKING:
    from collections.abc import Sequence

    from qwen3_asgi.scheduler.events import FinishReason


def ids_of(text: str) -> list[int]:
    """Tags as their one token, the rest byte by byte."""
    for tag in TAGS:
        head, found, tail = text.partition(tag)
        if found:
            return [*ids_of(head), token(tag), *ids_of(tail)]
    return byte_ids(text)


def batches(
    *texts: str,
    reason: FinishReason = "stop",
    stop_token: int | None = None,
    stop_reason: int | str | None = None,
    prompt_tokens: int = 5,
    cached_tokens: int = 0,
) -> list[TokenBatch]:
    """One batch per text; the last ends the request, after `stop_token` if there is one."""
    lists = [ids_of(text) for text in texts]
    if stop_token is not None:
        lists[-1].append(stop_token)
    finish = Finish(
        reason=reason,
        prompt_tokens=prompt_tokens,
        cached_tokens=cached_tokens,
        completion_tokens=sum(map(len, lists)),
        stop_reason=stop_reason,
        stop_token=stop_token,
    )
    ends = [None] * (len(lists) - 1) + [finish]
    return [
        TokenBatch(tuple(sampled(i) for i in ids), end)
        for ids, end in zip(lists, ends, strict=True)
    ]


def sampled(token_id: int) -> SampledToken:
    """With a logprob and two alternatives that can be told from the id."""
    return SampledToken(token_id, -0.5, ((token_id, -0.5), ((token_id + 1) % 256, -1.5)))


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "toy", **fields}


def content(chunks: Sequence[dict[str, Any]], field: str = "content") -> str:
    """The text that a client of a chat stream puts together."""
    return "".join(
        choice["delta"].get(field) or "" for chunk in chunks for choice in chunk["choices"]
    )
