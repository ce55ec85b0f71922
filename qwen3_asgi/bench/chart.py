"""Lines over a logarithmic axis as an SVG, for what grows by powers of two.

Without a background, and in colours that can be read on a light and a dark page.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple
from xml.sax.saxutils import escape

if TYPE_CHECKING:
    from collections.abc import Sequence

WIDTH, HEIGHT = 720, 400
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 34, 44
LEGEND_LINE = 16
TEXT = "#808890"
COLOURS = (
    *("#3b82c4", "#e08a1e", "#5f9e6e", "#a06cc0", "#d64545", "#9aa3ab", "#b8860b", "#2aa198"),
    "#d0679d",
)


class Series(NamedTuple):
    """One line: its name and its (x, y) points, x above 0."""

    name: str
    points: tuple[tuple[float, float], ...]


def line_chart(title: str, x_label: str, series: Sequence[Series]) -> str:
    """The lines as an SVG document; y begins at 0.

    Raises:
        ValueError: no points, or an x that has no logarithm.
    """
    points = [point for each in series for point in each.points]
    if not points or min(x for x, _ in points) <= 0:
        raise ValueError("a chart needs points, and x above 0")
    xs = sorted({x for x, _ in points})
    low, high = math.log2(xs[0]), math.log2(xs[-1])
    step = _step(max(y for _, y in points))
    top = step * max(1, math.ceil(max(y for _, y in points) / step))
    bottom = HEIGHT - BOTTOM

    def place(x: float, y: float) -> tuple[float, float]:
        share = (math.log2(x) - low) / (high - low) if high > low else 0.5
        return LEFT + share * (WIDTH - LEFT - RIGHT), bottom - y / top * (bottom - TOP)

    parts = [_text(LEFT, 16, title, weight="bold")]
    for line in range(round(top / step) + 1):
        _, y = place(xs[0], line * step)
        parts.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="{TEXT}" opacity=".25"/>')
        parts.append(_text(LEFT - 6, y + 4, f"{line * step:g}", anchor="end"))
    parts += [_text(place(x, 0)[0], bottom + 16, f"{x:g}", anchor="middle") for x in xs]
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, bottom + 34, x_label, anchor="middle"))
    for index, each in enumerate(series):
        colour = COLOURS[index % len(COLOURS)]
        at = [place(x, y) for x, y in sorted(each.points)]
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in at)
        parts.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for (x, y), (_, value) in zip(at, sorted(each.points), strict=True):
            tip = f"<title>{escape(each.name)}: {value:g}</title>"
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}">{tip}</circle>')
        below = HEIGHT + index * LEGEND_LINE
        parts.append(f'<circle cx="{LEFT + 4}" cy="{below}" r="4" fill="{colour}"/>')
        parts.append(_text(LEFT + 14, below + 4, each.name))
    height = HEIGHT + len(series) * LEGEND_LINE
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'font-family="system-ui, sans-serif" font-size="11" fill="{TEXT}">'
    )
    return "\n".join([head, *parts, "</svg>", ""])


def _step(most: float) -> float:
    """A round distance of which about five reach `most`."""
    if most <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(most / 5))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor * 5 >= most)


def _text(x: float, y: float, text: str, *, anchor: str = "start", weight: str = "normal") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-weight="{weight}">'
        f"{escape(text)}</text>"
    )
