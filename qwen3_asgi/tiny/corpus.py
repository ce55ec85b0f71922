"""The training text: an endless, seeded stream of dialogues and plain texts.

Anything that holds a held-out question is dropped here, so the evaluation can't leak.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from .chat import brief, chained, pick, several, single
from .copying import echo, instructed, recall
from .counting import counting, plain_count
from .facts import fill
from .heldout import heldout_items
from .sample import Dialogue, Plain, Sample, normalised, user_texts
from .smalltalk import small_talk
from .tooltalk import answering, calling, ignoring, without_tools
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


MIXTURE: tuple[tuple[Callable[[Random], Sample], float], ...] = (
    (single, 30),
    (several, 16),
    (chained, 7),
    (brief, 8),
    (_chatter, 3),
    (echo, 10),
    (recall, 7),
    (instructed, 1.5),
    (counting, 5),
    (calling, 9),
    (answering, 5),
    (ignoring, 4),
    (without_tools, 1),
    (_plain, 6),
)


def samples(seed: int) -> Iterator[Sample]:
    """The same seed yields the same stream, on any machine."""
    rng = Random(seed)
    makers = [maker for maker, _ in MIXTURE]
    weights = [weight for _, weight in MIXTURE]
    kept_back = {
        normalised(text) for item in heldout_items() for text in item.held_out_texts
    }
    while True:
        sample = rng.choices(makers, weights)[0](rng)
        if isinstance(sample, Dialogue) and any(
            normalised(text) in kept_back for text in user_texts(sample)
        ):
            continue
        yield sample
