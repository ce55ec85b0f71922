"""What each request field that we do not act on may hold: a field is never silently ignored.

A field is harmless (it can't change the output), neutral (accepted at the value that asks for
nothing), or refused by name. `requests` calls `check_fields` on everything its models don't know.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from qwen3_asgi.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_NAME_CHARS = 64

# Bookkeeping of the caller, or hints about routing, caching and billing.
HARMLESS = frozenset(
    {
        "metadata",
        "parallel_tool_calls",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "user",
    }
)

# Known to OpenAI's or vLLM's clients, and accepted only at a value that asks for nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "audio": (),
    "best_of": (1,),
    "continue_final_message": (False,),
    "detokenize": (True,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "include_reasoning": (True,),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "presence_penalty": (0,),
    "reasoning_effort": (),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "separate_reasoning": (True,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "store": (False,),
    "structured_outputs": (),
    "suffix": ("",),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "web_search_options": (),
}


def check_fields(fields: Mapping[str, Any]) -> None:
    """Accept fields that change nothing.

    Raises:
        InvalidRequest: a field is unknown, or asks for something this server does not do.
    """
    for name, value in fields.items():
        # null is how clients spell "not set", whatever the field.
        if value is None or name in HARMLESS:
            continue
        shown = name[:MAX_NAME_CHARS]
        if name not in NEUTRAL:
            raise InvalidRequest(
                f"unknown parameter: {shown!r}", param=shown, code="unknown_parameter"
            )
        if not any(_same(value, neutral) for neutral in NEUTRAL[name]):
            raise InvalidRequest(
                f"{name} is not supported with this value", param=name, code="unsupported_parameter"
            )


def _same(value: object, neutral: object) -> bool:
    # 1 == True in Python, but not in JSON.
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)
