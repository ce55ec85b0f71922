"""Counting up and down, from a few numbers to a hundred of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .turns import Turn, any_system, any_thinking, compose

if TYPE_CHECKING:
    from random import Random

    from .sample import Dialogue

_UP = (
    "Count from {a} to {b}.", "Count up from {a} to {b}.", "Please count from {a} to {b}.",
    "Can you count from {a} to {b}?", "List the numbers from {a} to {b}.", "Count {a} to {b}.",
    "Write the numbers from {a} to {b}.", "Give me the numbers from {a} to {b}.",
    "Tell me the numbers from {a} to {b}.", "Start at {a} and count to {b}.",
    "I want you to count from {a} to {b}.", "Count from {a} up to {b}.", "count from {a} to {b}",
)  # fmt: skip
_UP_FROM_ONE = ("Count to {b}.", "Please count to {b}.", "Can you count to {b}?", "Count up to {b}")
_DOWN = (
    "Count down from {a} to {b}.", "Count backwards from {a} to {b}.",
    "Please count down from {a} to {b}.", "Count from {a} down to {b}.", "Count from {a} to {b}.",
    "Can you count down from {a} to {b}?", "List the numbers from {a} down to {b}.",
    "Start at {a} and count down to {b}.", "count down from {a} to {b}",
)  # fmt: skip
UNSEEN_UP = (
    "Would you count from {a} to {b}?", "Name the numbers from {a} to {b}.",
    "Please start at {a} and count to {b}.",
)  # fmt: skip
UNSEEN_DOWN = ("Please count backwards from {a} to {b}.", "Would you count down from {a} to {b}?")


def is_unseen(a: int, b: int) -> bool:
    """Ranges that training leaves out; counts from or to one stay in."""
    return 1 not in (a, b) and (a * 7 + b * 13) % 17 == 3


def numbers(a: int, b: int) -> str:
    step = 1 if b >= a else -1
    return ", ".join(str(n) for n in range(a, b + step, step))


def counting_turn(a: int, b: int, frame: str) -> Turn:
    direction = "up" if b >= a else "down"
    return Turn(frame.format(a=a, b=b), numbers(a, b), f"I count {direction} from {a} to {b}.")


def _range(rng: Random) -> tuple[int, int]:
    while True:
        length = rng.choice((rng.randint(2, 12), rng.randint(2, 12), rng.randint(10, 30)))
        if rng.random() < 0.12:
            length = rng.randint(30, 99)
        a = 1 if rng.random() < 0.25 else rng.randint(0, max(1, 100 - length))
        if not is_unseen(a, a + length) and not is_unseen(a + length, a):
            return a, a + length


def counting(rng: Random) -> Dialogue:
    a, b = _range(rng)
    if rng.random() < 0.35:
        turn = counting_turn(b, a, rng.choice(_DOWN))
        if a == 1 and rng.random() < 0.4:
            turn = turn._replace(ask=f"Count down from {b}.")
    elif a == 1 and rng.random() < 0.3:
        turn = counting_turn(a, b, rng.choice(_UP_FROM_ONE))
    else:
        turn = counting_turn(a, b, rng.choice(_UP))
    return compose([turn], thinking=any_thinking(rng), instruction=any_system(rng))


def plain_count(rng: Random) -> str:
    a, b = _range(rng)
    return numbers(a, b) if rng.random() < 0.8 else numbers(b, a)
