"""The values that flow from the generators to the trainer: a dialogue or a plain text."""

from __future__ import annotations

from dataclasses import dataclass, field

Json = dict[str, object]


@dataclass(frozen=True, slots=True)
class Dialogue:
    """Messages as `apply_chat_template` takes them; the last one is what the model must write."""

    messages: tuple[Json, ...]
    tools: tuple[Json, ...] = field(default=())
    enable_thinking: bool = False


@dataclass(frozen=True, slots=True)
class Plain:
    """Text for the completions endpoint, without any chat markup."""

    text: str


Sample = Dialogue | Plain


def system(text: str) -> Json:
    return {"role": "system", "content": text}


def user(text: str) -> Json:
    return {"role": "user", "content": text}


def assistant(text: str, reasoning: str = "") -> Json:
    message: Json = {"role": "assistant", "content": text}
    if reasoning:
        message["reasoning_content"] = reasoning
    return message


def user_texts(dialogue: Dialogue) -> list[str]:
    return [str(m["content"]) for m in dialogue.messages if m["role"] == "user"]


def normalised(text: str) -> str:
    """Letters and digits only, in lower case: two questions that differ less are the same."""
    return " ".join("".join(c if c.isalnum() or c in "+-*" else " " for c in text).lower().split())
