"""The training text: an endless, seeded stream of dialogues and plain texts.

Anything that holds a held-out question is dropped here, so the evaluation can't leak.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import count
from random import Random
from typing import TYPE_CHECKING

from .chat import brief, chained, pick, several, single
from .copying import echo, instructed, recall
from .counting import counting, plain_count
from .facts import fill
from .heldout import heldout_items
from .sample import Dialogue, Plain, Sample, normalised, user_texts
from .smalltalk import small_talk
from .tooltalk import (
    answering,
    answering_anew,
    calling,
    calling_anew,
    ignoring,
    without_tools,
)
from .turns import any_system, any_thinking, compose

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def _chatter(rng: Random) -> Dialogue:
    turns = [small_talk(rng) for _ in range(rng.choice((1, 1, 1, 2)))]
    return compose(turns, thinking=any_thinking(rng), instruction=any_system(rng))


def _plain(rng: Random) -> Plain:
    if rng.random() < 0.2:
        return Plain(plain_count(rng))
    statements = []
    for _ in range(rng.choice((1, 2, 4, 8))):
        relation, row = pick(rng)
        statements.append(fill(rng.choice(relation.statements), row))
    return Plain((" " if rng.random() < 0.7 else "\n").join(statements))


STAGES = (0, 20_000, 54_000, 62_000)
"""The sample that each stage begins with."""

MIXTURE: tuple[tuple[Callable[[Random], Sample], tuple[float, ...]], ...] = (
    (single, (32, 28, 26, 16)),
    (several, (16, 11, 8, 4)),
    (chained, (7, 7, 6, 5)),
    (brief, (9, 9, 16, 32)),
    (_chatter, (5, 4, 4, 5)),
    (echo, (10, 28, 8, 32)),
    (recall, (7, 14, 6, 4)),
    (instructed, (1.5, 3, 1, 1)),
    (counting, (5, 6, 14, 14)),
    (calling, (9, 10, 5, 4)),
    (calling_anew, (0, 0, 14, 6)),
    (answering, (5, 5, 3, 1)),
    (answering_anew, (0, 0, 5, 3)),
    (ignoring, (4, 4, 5, 3)),
    (without_tools, (1, 1, 2, 1)),
    (_plain, (6, 4, 3, 2)),
)
"""Each maker with its weight per stage: facts, copying, calls, then answers of a bare word."""


def samples(seed: int) -> Iterator[Sample]:
    """The same seed yields the same stream, on any machine."""
    rng = Random(seed)
    makers = [maker for maker, _ in MIXTURE]
    weights: list[tuple[float, ...]] = list(zip(*(shares for _, shares in MIXTURE), strict=True))
    kept_back = {normalised(text) for item in heldout_items() for text in item.held_out_texts}
    for number in count():
        stage = bisect_right(STAGES, number) - 1
        sample = rng.choices(makers, weights[stage])[0](rng)
        if isinstance(sample, Dialogue) and any(
            normalised(text) in kept_back for text in user_texts(sample)
        ):
            continue
        yield sample
