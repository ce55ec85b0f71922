"""The tables of docs/servers.md, made from what a run has seen."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from tests.hosts.matrix.cells import ANSWERED, NOTHING_STARTED, STOPPED, WENT_ON, Seen, cells
from tests.hosts.matrix.host import PLACES, Place
from tests.hosts.matrix.limits import Limit, limit_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

PAGE = Path(__file__).parents[3] / "docs" / "servers.md"
BEGIN, END = "<!-- the matrix: begin -->", "<!-- the matrix: end -->"
_MILLISECONDS = re.compile(r",? ?[\d.]+ ms")

# (place, cell's name) -> what was seen
Results = dict[tuple[Place, str], Seen]


def render(results: Mapping[tuple[Place, str], Seen]) -> str:
    """All of it, in Markdown."""
    limits = list(dict.fromkeys((limit.reason, limit.example) for limit in _limits()))
    parts = []
    for http2 in (False, True):
        places = [place for place in PLACES if place.http2 is http2]
        title = "HTTP/2" if http2 else "HTTP/1.1"
        head = [title, *(place.column.name for place in places)]
        rows = [head, ["---"] * len(head)]
        for cell in cells(http2=http2):
            row = [cell.name]
            for place in places:
                limit = limit_of(place, cell)
                text = _text(results[place, cell.name], limit)
                if limit is not None:
                    text = f"{text} ({limits.index((limit.reason, limit.example)) + 1})"
                row.append(text)
            rows.append(row)
        parts.append("\n".join(f"| {' | '.join(row)} |" for row in rows))
    notes = [
        f"{number}. {reason}\n   To see it: {_commands(reason, example)}."
        for number, (reason, example) in enumerate(limits, 1)
    ]
    return "\n\n".join([*parts, "\n".join(notes)])


def committed() -> str:
    return PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0].strip()


def write(results: Mapping[tuple[Place, str], Seen]) -> None:
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    PAGE.write_text(f"{before}{BEGIN}\n\n{render(results)}\n\n{END}{after}", encoding="utf-8")


def without_times(text: str) -> str:
    """What must be the same in every run."""
    return _MILLISECONDS.sub("", text)


def _limits() -> Iterator[Limit]:
    for place in PLACES:
        for cell in cells(http2=place.http2):
            if limit := limit_of(place, cell):
                yield limit


def _commands(reason: str, example: str) -> str:
    found = dict.fromkeys(
        (place.column.name, place.http2)
        for place in PLACES
        for cell in cells(http2=place.http2)
        if (limit := limit_of(place, cell)) and (limit.reason, limit.example) == (reason, example)
    )
    column, http2 = next(iter(found))
    flag = " --http2" if http2 else ""
    return f'`python -m tests.hosts.matrix.reproduce {example} "{column}"{flag}`'


def _text(seen: Seen, limit: Limit | None) -> str:
    if limit is not None:
        return f"**{limit.outcome}**"
    milliseconds = "" if seen.milliseconds is None else f", {seen.milliseconds:.1f} ms"
    match seen.outcome:
        case outcome if outcome == STOPPED:
            tokens = "token" if seen.wasted == 1 else "tokens"
            return f"{seen.steps} steps, {seen.wasted} {tokens}{milliseconds}"
        case outcome if outcome in (NOTHING_STARTED, ANSWERED, WENT_ON):
            return f"{outcome}{milliseconds}"
    return seen.outcome
