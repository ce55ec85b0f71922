"""Chats about facts: single questions, follow-ups, one-word answers and several in a row."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .facts import RELATIONS, Relation, fill
from .phrasing import FOLLOW_UPS, follow_up, question
from .smalltalk import small_talk
from .turns import ONE_WORD_SYSTEMS, Turn, any_system, any_thinking, compose

if TYPE_CHECKING:
    from random import Random

    from .facts.relation import Row
    from .sample import Dialogue

_WEIGHTS = tuple(max(10.0, min(len(relation.rows), 110) ** 0.9) for relation in RELATIONS)
_CHAINED = tuple(relation for relation in RELATIONS if relation.follow_up)
_BRIEF = (
    "Answer in one word: {q}", "In one word: {q}", "{q} Answer in one word.",
    "{q} One word, please.", "One word only: {q}", "{q} Just the word.",
)  # fmt: skip
UNSEEN_BRIEF = ("{q} Answer with one word.", "Just one word: {q}")


def pick(rng: Random) -> tuple[Relation, Row]:
    relation = rng.choices(RELATIONS, _WEIGHTS)[0]
    return relation, rng.choice(relation.rows)


def full_answer(relation: Relation, row: Row) -> str:
    return fill(relation.answer, row)


def short_answer(relation: Relation, row: Row) -> str:
    return fill(relation.short, row)


def fact_turn(rng: Random, relation: Relation, row: Row) -> Turn:
    return Turn(
        question(rng, relation, row), full_answer(relation, row), fill(relation.thought, row)
    )


def single(rng: Random) -> Dialogue:
    return compose(
        [fact_turn(rng, *pick(rng))], thinking=any_thinking(rng), instruction=any_system(rng)
    )


def several(rng: Random) -> Dialogue:
    """Unrelated questions one after the other, with small talk in between."""
    turns = [
        small_talk(rng) if rng.random() < 0.2 else fact_turn(rng, *pick(rng))
        for _ in range(rng.randint(2, 6))
    ]
    return compose(turns, thinking=any_thinking(rng), instruction=any_system(rng))


def chained(rng: Random) -> Dialogue:
    """`What is the capital of France?` … `And of Italy?`"""
    relation = rng.choice(_CHAINED)
    picked = rng.sample(relation.rows, rng.randint(2, 4))
    turns = [fact_turn(rng, relation, picked[0])]
    for row in picked[1:]:
        if rng.random() < 0.15:
            turns.append(fact_turn(rng, *pick(rng)))
            turns.append(fact_turn(rng, relation, row))
            continue
        ask = follow_up(rng, relation, row, FOLLOW_UPS)
        turns.append(Turn(ask, full_answer(relation, row), fill(relation.thought, row)))
    return compose(turns, thinking=any_thinking(rng), instruction=any_system(rng))


def brief(rng: Random) -> Dialogue:
    """The bare answer, when the system prompt or the question asks for one word."""
    by_system = rng.random() < 0.6
    turns = []
    for _ in range(rng.choice((1, 1, 2, 3))):
        relation, row = pick(rng)
        ask = question(rng, relation, row)
        if not by_system:
            ask = rng.choice(_BRIEF).format(q=ask)
        turns.append(Turn(ask, short_answer(relation, row), fill(relation.thought, row)))
    instruction = rng.choice(ONE_WORD_SYSTEMS) if by_system else any_system(rng)
    return compose(turns, thinking=any_thinking(rng), instruction=instruction)
