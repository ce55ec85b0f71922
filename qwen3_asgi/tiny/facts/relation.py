"""One kind of fact: its rows, how people ask for it and how the model answers.

A frame is a string with `{x}` (what is asked about), `{y}` (the answer), and for both the
variants with an article (`{ax}`) and with a capital first letter (`{X}`, `{AX}`).
"""

from __future__ import annotations

from dataclasses import dataclass

Row = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Relation:
    """`nouns` and `clauses` go into shared frames ("Tell me …"); `questions` stand alone.

    `unseen` holds whole questions that only the held-out evaluation asks.
    """

    name: str
    rows: tuple[Row, ...]
    answer: str
    thought: str
    nouns: tuple[str, ...] = ()
    clauses: tuple[str, ...] = ()
    questions: tuple[str, ...] = ()
    unseen: tuple[str, ...] = ()
    statements: tuple[str, ...] = ()
    follow_up: str = ""
    short: str = "{y}"


def rows(text: str) -> tuple[Row, ...]:
    """Reads `France: Paris; Italy: Rome` into pairs."""
    pairs = (entry.partition(":") for entry in text.replace("\n", " ").split(";") if entry.strip())
    return tuple((left.strip(), right.strip()) for left, _, right in pairs)


def reversed_rows(pairs: tuple[Row, ...]) -> tuple[Row, ...]:
    return tuple((right, left) for left, right in pairs)


def lines(text: str) -> tuple[str, ...]:
    """One frame per line; blank lines and indentation don't count."""
    return tuple(line.strip() for line in text.splitlines() if line.strip())


def split(text: str) -> tuple[str, ...]:
    """Words apart by blanks."""
    return tuple(text.split())


def with_article(noun: str) -> str:
    return f"{'an' if noun[:1].lower() in 'aeio' else 'a'} {noun}"


def capitalised(text: str) -> str:
    return text[:1].upper() + text[1:]


def fill(frame: str, row: Row) -> str:
    x, y = row
    ax, ay = with_article(x), with_article(y)
    return frame.format(
        x=x,
        y=y,
        ax=ax,
        ay=ay,
        X=capitalised(x),
        Y=capitalised(y),
        AX=capitalised(ax),
        AY=capitalised(ay),
    )
