"""Token counts in OpenAI's shape, for one choice or the sum over several."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from qwen3_asgi.openai.choice import ChoiceOutput


def usage(choices: Sequence[ChoiceOutput], *, reasoning: bool) -> dict[str, Any]:
    """Return the counts so far; `cached_tokens` is known once a choice has finished.

    A prompt of several choices is counted once.
    """
    prompts = [choice for choice in choices if not choice.shares_prompt]
    prompt_tokens = sum(choice.prompt_tokens for choice in prompts)
    completion_tokens = sum(
        choice.finish.completion_tokens if choice.finish else choice.num_tokens
        for choice in choices
    )
    counts: dict[str, Any] = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {
            "cached_tokens": sum(c.finish.cached_tokens for c in prompts if c.finish)
        },
    }
    if reasoning:
        counts["completion_tokens_details"] = {
            "reasoning_tokens": sum(choice.reasoning_tokens for choice in choices)
        }
    return counts
