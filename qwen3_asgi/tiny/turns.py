"""One question and its answer, and how several of them become a dialogue."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from .sample import Dialogue, Json, assistant, system, user

if TYPE_CHECKING:
    from collections.abc import Sequence
    from random import Random

SYSTEMS = (
    "You are a helpful assistant.",
    "You are a helpful assistant.",
    "You are a friendly assistant.",
    "You are a tiny assistant. Answer briefly.",
    "Answer the questions of the user.",
    "Be brief.",
    "Be polite and helpful.",
    "You answer simple questions.",
    "You are a teacher for children.",
    "Answer in a full sentence.",
)

ONE_WORD_SYSTEMS = (
    "Answer in one word.",
    "Answer with one word.",
    "Answer with a single word.",
    "You are a helpful assistant. Answer in one word.",
    "Give only the answer, no sentence.",
    "Answer only with the word itself.",
    "One word answers only.",
    "Reply in one word.",
)
UNSEEN_ONE_WORD_SYSTEMS = ("Reply with a single word.", "Answer only in one word.")


class Turn(NamedTuple):
    ask: str
    answer: str
    thought: str


def compose(
    turns: Sequence[Turn],
    *,
    thinking: bool,
    instruction: str = "",
    tools: tuple[Json, ...] = (),
) -> Dialogue:
    """Only the last answer carries reasoning: the template would drop it from the others."""
    messages: list[Json] = [system(instruction)] if instruction else []
    for turn in turns[:-1]:
        messages += [user(turn.ask), assistant(turn.answer)]
    last = turns[-1]
    messages += [user(last.ask), assistant(last.answer, last.thought if thinking else "")]
    return Dialogue(tuple(messages), tools, thinking)


def any_system(rng: Random) -> str:
    return rng.choice(SYSTEMS) if rng.random() < 0.45 else ""


def any_thinking(rng: Random) -> bool:
    return rng.random() < 0.35
