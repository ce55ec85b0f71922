"""Turns a row of a relation into a question: shared frames, openings, closings and sloppy typing.

The `UNSEEN_` frames belong to the held-out evaluation and never reach the training text.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .facts import fill, spoken
from .facts.relation import capitalised, lines

if TYPE_CHECKING:
    from random import Random

    from .facts import Relation
    from .facts.relation import Row

_NOUN_FRAMES = lines("""
    What is {n}?
    What's {n}?
    Tell me {n}.
    Name {n}.
    Give me {n}.
    Do you know {n}?
    Can you tell me {n}?
    Can you name {n}?
    Could you tell me {n}?
    I would like to know {n}.
    I want to know {n}.
    I need {n}.
    Please give me {n}.
    Please name {n}.
    I forgot {n}. What is it?
    I am looking for {n}. Can you help?
    Please write {n}.
    {n}?
    {n}
    What would be {n}?
    Help me find {n}.
    I must learn {n}. What is it?
    My question is about {n}.
    Tell me about {n}.
    Let us talk about {n}. What is it?
""")

_CLAUSE_FRAMES = lines("""
    Tell me {n}.
    Do you know {n}?
    Can you tell me {n}?
    Could you tell me {n}?
    Please tell me {n}.
    I would like to know {n}.
    I want to know {n}.
    I do not know {n}. Can you help?
    I forgot {n}. Please tell me.
    My question is {n}.
    Please explain {n}.
    Help me: {n}?
    Do you remember {n}?
    I am asking you {n}.
    Say {n}.
""")

UNSEEN_NOUN_FRAMES = lines("""
    Would you tell me {n}?
    Could you please name {n}?
    I need to know {n}.
    Please help me find {n}.
    My question: what is {n}?
    Do you remember {n}?
    I forgot {n}. Can you help?
    Say {n}.
""")

UNSEEN_CLAUSE_FRAMES = lines("""
    Would you tell me {n}?
    I need to know {n}.
    Please help me and say {n}.
    Can you say {n}?
    I am looking for help: {n}?
""")

_OPENINGS = (
    "Please tell me: ", "Hello! ", "Hi! ", "Hi, ", "Quick question: ", "I have a question. ",
    "Can you help me? ", "One more question: ", "Question: ", "Please answer: ", "Excuse me, ",
    "Now tell me: ", "Next: ", "So, ", "Good morning! ", "Hey, ", "Thanks. ", "OK. ",
)  # fmt: skip

_CLOSINGS = (
    " Please.", " Thank you.", " Thanks!", " Do you know?", " Please answer.", " Tell me.",
    " I forgot.", " I want to learn it.", " Answer briefly.",
)  # fmt: skip

FOLLOW_UPS = (
    "And {n}?", "What about {n}?", "And what about {n}?", "How about {n}?", "And for {n}?",
    "Now {n}.", "And now {n}?", "The same for {n}, please.", "{n}?", "OK, and {n}?",
)  # fmt: skip

UNSEEN_FOLLOW_UPS = ("And how about {n}?", "Now what about {n}?", "Thanks, and {n}?")


def _spoken_row(rng: Random, relation: Relation, row: Row) -> Row:
    if relation.name == "arithmetic":
        style = rng.random()
        if style < 0.35:
            return spoken(row[0]), row[1]
        if style < 0.5:
            return row[0].replace(" ", ""), row[1]
    return row


def _sloppy(rng: Random, text: str) -> str:
    """As people type: no capitals, no final mark."""
    if rng.random() < 0.2:
        text = text.lower()
    if rng.random() < 0.12:
        text = text.rstrip("?.")
    return text


def question(rng: Random, relation: Relation, row: Row) -> str:
    """One way to ask, never a held-out one."""
    row = _spoken_row(rng, relation, row)
    kind = rng.random()
    if kind < 0.5 or not (relation.nouns or relation.clauses):
        text = fill(rng.choice(relation.questions), row)
    elif kind < 0.8 and relation.nouns:
        text = _framed(rng, _NOUN_FRAMES, relation.nouns, row)
    else:
        text = _framed(rng, _CLAUSE_FRAMES, relation.clauses or relation.nouns, row)
    if rng.random() < 0.2:
        text = rng.choice(_OPENINGS) + text
    if rng.random() < 0.1:
        text += rng.choice(_CLOSINGS)
    return _sloppy(rng, text)


def _framed(rng: Random, frames: tuple[str, ...], parts: tuple[str, ...], row: Row) -> str:
    return capitalised(rng.choice(frames).format(n=fill(rng.choice(parts), row)))


def unseen_question(rng: Random, relation: Relation, row: Row) -> str:
    """A way to ask that training never shows."""
    kind = rng.random()
    if kind < 0.6:
        return fill(rng.choice(relation.unseen), row)
    if kind < 0.8 and relation.nouns:
        return _framed(rng, UNSEEN_NOUN_FRAMES, relation.nouns, row)
    return _framed(rng, UNSEEN_CLAUSE_FRAMES, relation.clauses or relation.nouns, row)


def follow_up(rng: Random, relation: Relation, row: Row, frames: tuple[str, ...]) -> str:
    return capitalised(rng.choice(frames).format(n=fill(relation.follow_up, row)))
