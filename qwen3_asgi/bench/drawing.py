"""A scheduler's trace in, an SVG timeline out: the loop, its steps, and a lane for each request.

Written by hand, without a background, and in colours that can be read on a light and a dark page.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, NamedTuple
from xml.sax.saxutils import escape

if TYPE_CHECKING:
    from collections.abc import Iterable

    from qwen3_asgi.scheduler.trace import Iteration, Trace, TracedStep

WIDTH, LEFT, RIGHT = 960, 130, 16
LANE, GAP, TOP, AXIS = 20, 6, 58, 34
TEXT = "#808890"
COLOURS = {
    "decode": "#3b82c4",
    "prefill": "#e08a1e",
    "mixed": "#a06cc0",
    "waiting": "#9aa3ab",
    "scheduler": "#5f9e6e",
    "sweep": "#d64545",
    "gone": "#d64545",
}
LEGEND = (
    ("scheduler", "scheduler"),
    ("sweep", "sweep"),
    ("prefill", "prefill"),
    ("decode", "decode"),
    ("mixed", "step with both"),
    ("waiting", "waiting"),
)
# Narrower than this nothing can be seen.
MIN_WIDTH = 0.7
# Parts that are no work of the scheduler's own.
NOT_OWN = ("execute", "park")


class Window(NamedTuple):
    """What part of a trace is drawn, in seconds on the scheduler's clock."""

    begin: float
    end: float

    def overlaps(self, begin: float, end: float) -> bool:
        return begin < self.end and end > self.begin


@dataclass
class Life:
    """One request, as far as the trace knows it."""

    name: str
    submitted: float | None = None
    admitted: float | None = None
    ended: float | None = None
    reason: str = ""
    swept_from: str = ""
    disconnected: float | None = None
    parts: list[tuple[str, float, float]] = field(default_factory=list)

    @property
    def begin(self) -> float:
        known = [self.submitted, self.admitted, *(begin for _, begin, _ in self.parts[:1])]
        return min((at for at in known if at is not None), default=0.0)


def whole(trace: Trace) -> Window:
    """
    Raises:
        ValueError: there is nothing in the trace.
    """
    if not trace.iterations:
        raise ValueError("the trace is empty")
    return Window(trace.iterations[0].begin, trace.iterations[-1].end)


def lives(trace: Trace) -> list[Life]:
    """Every request of the trace, in the order in which it was first seen."""
    found: dict[str, Life] = {}

    def life(name: str) -> Life:
        return found.setdefault(name, Life(name))

    for mark in sorted(trace.marks, key=lambda each: each.at):
        if mark.what == "submit":
            life(mark.request).submitted = mark.at
        elif mark.what == "disconnect":
            life(mark.request).disconnected = mark.at
    for iteration in trace.iterations:
        for each in iteration.happenings:
            one = life(each.request)
            if each.what == "admit":
                one.admitted = each.at
            elif each.what == "cancel":
                one.swept_from = each.detail
            elif each.what == "finish":
                one.ended, one.reason = each.at, each.detail
        for step in iteration.steps:
            for row in step.rows:
                life(row.request).parts.append((row.kind, step.begin, step.end))
    return sorted(found.values(), key=lambda each: each.begin)


def timeline(trace: Trace, title: str, window: Window | None = None) -> str:
    """The trace (or the part of it in the window) as an SVG document.

    Raises:
        ValueError: there is nothing in the trace.
    """
    view = window or whole(trace)
    iterations = [each for each in trace.iterations if view.overlaps(each.begin, each.end)]
    if not iterations:
        raise ValueError("the trace has no iteration there")
    shown = [each for each in lives(trace) if _is_seen(each, view)]
    steps = [step for each in trace.iterations for step in each.steps]
    steps = [step for step in steps if view.overlaps(step.begin, step.end)]
    lanes = _step_lanes(steps)
    canvas = Canvas(view, 1 + len(lanes) + len(shown))
    canvas.title(title, iterations)
    canvas.lane("scheduler")
    for kind in ("scheduler", "sweep"):
        canvas.bars(kind, _own(iterations, kind))
    for name, lane in lanes.items():
        canvas.lane(name)
        for kind in ("decode", "prefill", "mixed"):
            canvas.bars(kind, [(s.begin, s.end) for s in lane if s.kind == kind])
    for each in shown:
        _draw(each, canvas)
    return canvas.document()


def _draw(life: Life, canvas: Canvas) -> None:
    canvas.lane(life.name)
    if life.submitted is not None:
        starts = [life.admitted, life.ended, *(begin for _, begin, _ in life.parts[:1])]
        until = min((at for at in starts if at is not None), default=canvas.view.end)
        canvas.bars("waiting", [(life.submitted, until)])
    for kind in ("prefill", "decode"):
        canvas.bars(kind, [(begin, end) for name, begin, end in life.parts if name == kind])
    if life.disconnected is not None:
        canvas.mark(life.disconnected, "hung up", "▼")
    if life.ended is not None:
        gone = life.reason in ("abort", "error")
        swept = f", swept from {life.swept_from}" if life.swept_from else ""
        canvas.mark(life.ended, f"{life.reason}{swept}", "✕" if gone else "●", gone=gone)


def _is_seen(life: Life, view: Window) -> bool:
    return view.overlaps(life.begin, view.end if life.ended is None else life.ended)


def _own(iterations: list[Iteration], kind: str) -> list[tuple[float, float]]:
    """The scheduler's own work: a sweep that dropped somebody, or all the rest."""
    return [
        (phase.begin, phase.end)
        for each in iterations
        for phase in each.phases
        if phase.name not in NOT_OWN
        and (kind == "sweep") == (phase.name == "sweep" and each.num_swept > 0)
    ]


def _step_lanes(steps: list[TracedStep]) -> dict[str, list[TracedStep]]:
    """One lane, or with overlap one for each kind: two steps at a time would hide each other."""
    ordered = sorted(steps, key=lambda step: step.begin)
    apart = all(a.end <= b.begin for a, b in pairwise(ordered))
    if apart:
        return {"steps": ordered}
    return {
        f"{kind} steps": [step for step in ordered if step.kind == kind]
        for kind in ("decode", "prefill")
    }


class Canvas:
    """Lanes from the top to the bottom; `lane` begins the next."""

    def __init__(self, view: Window, num_lanes: int) -> None:
        self.view = view
        self._height = TOP + num_lanes * (LANE + GAP) + AXIS
        self._y = float(TOP - LANE - GAP)
        self._parts: list[str] = []
        self._axis()

    def title(self, title: str, iterations: list[Iteration]) -> None:
        swept = sum(each.num_swept for each in iterations)
        own = median(each.own_seconds for each in iterations) * 1e6
        what = f"{title}: {len(iterations)} iterations of {own:.0f} µs, {swept} requests swept"
        self._text(LEFT, 18, what, size=13)
        x = float(LEFT)
        for kind, name in LEGEND:
            self._parts.append(
                f'<rect x="{x:.0f}" y="30" width="12" height="10" fill="{COLOURS[kind]}"/>'
            )
            self._text(x + 16, 39, name)
            x += 28 + 6 * len(name)
        self._text(x + 4, 39, "▼ hung up   ✕ swept or failed   ● finished")

    def lane(self, name: str) -> None:
        self._y += LANE + GAP
        self._text(LEFT - 8, self._y + LANE - 6, name, anchor="end")
        line = self._y + LANE
        self._parts.append(
            f'<path d="M{LEFT} {line:.0f}H{WIDTH - RIGHT}" stroke="{TEXT}" stroke-opacity=".25"/>'
        )

    def bars(self, kind: str, spans: Iterable[tuple[float, float]]) -> None:
        """All bars of one colour of this lane, as one path: there may be thousands."""
        height = LANE // 2 if kind == "waiting" else LANE - 2
        y = self._y + LANE - height
        path = []
        for begin, end in spans:
            if self.view.overlaps(begin, end):
                x, until = self._x(begin), self._x(end)
                width = max(MIN_WIDTH, until - x - 0.3)
                path.append(f"M{x:.1f} {y:.0f}h{width:.1f}v{height}h-{width:.1f}z")
        if path:
            opacity = ' fill-opacity=".55"' if kind == "waiting" else ""
            joined = "".join(path)
            self._parts.append(f'<path d="{joined}" fill="{COLOURS[kind]}"{opacity}/>')

    def mark(self, at: float, tip: str, sign: str, *, gone: bool = True) -> None:
        """A sign in this lane; who points at it reads the tip."""
        if self.view.begin <= at <= self.view.end:
            colour = COLOURS["gone"] if gone else TEXT
            y = self._y + (7 if sign == "▼" else LANE - 4)
            self._parts.append(
                f'<text x="{self._x(at):.1f}" y="{y:.0f}" text-anchor="middle" '
                f'font-weight="bold" fill="{colour}"><title>{escape(tip)}</title>{sign}</text>'
            )

    def document(self) -> str:
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self._height}" '
            f'font-family="system-ui, sans-serif" font-size="11" fill="{TEXT}">'
        )
        return "\n".join([head, *self._parts, "</svg>", ""])

    def _axis(self) -> None:
        seconds = self.view.end - self.view.begin
        step = _tick(seconds)
        bottom = self._height - AXIS + 6
        for i in range(int(seconds / step) + 1):
            x = self._x(self.view.begin + i * step)
            self._parts.append(
                f'<path d="M{x:.1f} {TOP - 6}V{bottom}" stroke="{TEXT}" stroke-opacity=".25"/>'
            )
            self._text(x, bottom + 14, f"{i * step * 1000:g} ms", anchor="middle")

    def _x(self, at: float) -> float:
        at = min(max(at, self.view.begin), self.view.end)
        share = (at - self.view.begin) / (self.view.end - self.view.begin)
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def _text(
        self, x: float, y: float, text: str, *, anchor: str = "start", size: int | None = None
    ) -> None:
        more = f' font-size="{size}"' if size else ""
        self._parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{more}>{escape(text)}</text>'
        )


def _tick(seconds: float) -> float:
    """A round distance, of which at most ten fit."""
    step = 1e-6
    while True:
        for factor in (1, 2, 5):
            if seconds / (step * factor) <= 10:
                return step * factor
        step *= 10
