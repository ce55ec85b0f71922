"""A record of the loop's last iterations: phases, steps, who came and went; and as JSON lines.

A `SchedulerTrace` is the `trace=` of a `Scheduler` and an observer of it, both at once.
"""

from __future__ import annotations

import json
import time
from collections import deque
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from qwen3_asgi.scheduler.events import Finish
    from qwen3_asgi.scheduler.load import LoadSnapshot
    from qwen3_asgi.scheduler.plan import StepPlan
    from qwen3_asgi.scheduler.request import Request, State


class Phase(NamedTuple):
    """A stretch of an iteration. Times are seconds on the scheduler's clock, here and below."""

    name: str
    begin: float
    end: float


class TracedRow(NamedTuple):
    """One request's part of a step."""

    request: str
    kind: str
    num_tokens: int


class Happening(NamedTuple):
    """Something that befell a request: admit, preempt, cancel, finish; or a caller's mark.

    `detail` is the queue that it was swept from, or the reason for its end.
    """

    what: str
    request: str
    at: float
    detail: str = ""


@dataclass(frozen=True, slots=True)
class TracedStep:
    """A forward pass; with overlap in the iteration in which it landed. `error` is what failed."""

    number: int
    kind: str
    begin: float
    end: float
    rows: tuple[TracedRow, ...]
    error: str = ""

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows)


@dataclass(frozen=True, slots=True)
class Iteration:
    """One turn of the loop, and the load at its end."""

    number: int
    begin: float
    end: float
    phases: tuple[Phase, ...]
    steps: tuple[TracedStep, ...]
    happenings: tuple[Happening, ...]
    num_running: int
    num_waiting: int
    kv_used_blocks: int
    num_swept: int
    sweep_seconds: float

    @property
    def own_seconds(self) -> float:
        """What the scheduler itself took: without steps, and without waiting for work."""
        return sum(
            phase.end - phase.begin
            for phase in self.phases
            if phase.name not in ("execute", "park")
        )


class Trace(NamedTuple):
    """What was recorded, the oldest first. `marks` were set from outside of the loop."""

    iterations: tuple[Iteration, ...]
    marks: tuple[Happening, ...]


class SchedulerTrace:
    """The last iterations of one scheduler, in a ring.

    Called on the scheduler thread; `mark` and `read` may be called on any.

    Args:
        max_iterations: so many are kept, and as many marks.
        clock: the scheduler's.
    """

    def __init__(
        self, max_iterations: int = 1024, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._done: deque[Iteration] = deque(maxlen=max_iterations)
        self._marks: deque[Happening] = deque(maxlen=max_iterations)
        self._begin: float | None = None
        self._open = ""
        self._since = 0.0
        self._reset(None)

    def phase(self, name: str) -> None:
        """A phase begins; the one before has ended."""
        now = self._clock()
        first = name == "poll" or (name == "drain" and self._open != "poll")
        if first:
            if self._begin is not None:
                self._done.append(self._snapshot(now))
            self._reset(now)
        elif self._open:
            self._phases.append(Phase(self._open, self._since, now))
        self._open, self._since = name, now

    def mark(self, what: str, request: str, detail: str = "") -> None:
        """Note something that the loop does not know, such as when a client hung up."""
        self._marks.append(Happening(what, request, self._clock(), detail))

    def read(self) -> Trace:
        """What was recorded so far, with the iteration that is running."""
        done = tuple(self._done.copy())
        if self._begin is not None:
            done += (self._snapshot(self._clock()),)
        return Trace(done, tuple(self._marks.copy()))

    # ---- SchedulerObserver ----

    def on_load(self, load: LoadSnapshot) -> None:
        self._load = (load.iteration, load.num_running, load.num_waiting, load.kv_used_blocks)

    def on_step(self, plan: StepPlan, seconds: float) -> None:
        now = self._clock()
        # Read now: the scheduler writes the next step's tokens into the rows.
        rows = tuple(TracedRow(row.request_id, row.kind, len(row.token_ids)) for row in plan.rows)
        self._steps.append(TracedStep(plan.step, plan.kind, now - seconds, now, rows))

    def on_step_failure(self, plan: StepPlan, error: Exception) -> None:
        for place, step in enumerate(self._steps):
            if step.number == plan.step:
                self._steps[place] = TracedStep(
                    step.number, step.kind, step.begin, step.end, step.rows, repr(error)
                )

    def on_sweep(self, seconds: float, num_swept: int) -> None:
        self._sweep = (num_swept, seconds)

    def on_admit(self, request: Request, cached_tokens: int) -> None:
        self._note("admit", request)

    def on_preempt(self, request: Request) -> None:
        self._note("preempt", request)

    def on_tokens(
        self, first: Sequence[tuple[Request, float]], intervals: Mapping[float, int]
    ) -> None:
        """The steps have them."""

    def on_cancel(self, request: Request, state: State, wasted_tokens: int) -> None:
        self._note("cancel", request, state.value)

    def on_finish(self, request: Request, finish: Finish) -> None:
        self._note("finish", request, finish.reason)

    def _note(self, what: str, request: Request, detail: str = "") -> None:
        self._happenings.append(Happening(what, request.id, self._clock(), detail))

    def _reset(self, begin: float | None) -> None:
        self._begin = begin
        self._phases: list[Phase] = []
        self._steps: list[TracedStep] = []
        self._happenings: list[Happening] = []
        self._sweep = (0, 0.0)
        self._load = (0, 0, 0, 0)

    def _snapshot(self, now: float) -> Iteration:
        number, num_running, num_waiting, kv_used_blocks = self._load
        num_swept, sweep_seconds = self._sweep
        begin = now if self._begin is None else self._begin
        last = (Phase(self._open, self._since, now),) if self._open else ()
        return Iteration(
            number=number,
            begin=begin,
            end=now,
            phases=(*self._phases, *last),
            steps=tuple(self._steps),
            happenings=tuple(self._happenings),
            num_running=num_running,
            num_waiting=num_waiting,
            kv_used_blocks=kv_used_blocks,
            num_swept=num_swept,
            sweep_seconds=sweep_seconds,
        )


def to_json_lines(trace: Trace) -> Iterator[str]:
    """One object per line, in order of time: iterations (`"number"`) and marks (`"mark"`)."""
    marks = deque(sorted(trace.marks, key=lambda mark: mark.at))
    for iteration in trace.iterations:
        while marks and marks[0].at < iteration.begin:
            yield _mark_line(marks.popleft())
        yield json.dumps(asdict(iteration), separators=(",", ":"))
    for mark in marks:
        yield _mark_line(mark)


def from_json_lines(lines: Iterable[str]) -> Trace:
    """What `to_json_lines` wrote.

    Raises:
        ValueError: a line is something else.
    """
    iterations: list[Iteration] = []
    marks: list[Happening] = []
    for place, line in enumerate(lines, 1):
        try:
            entry = json.loads(line)
            if "mark" in entry:
                marks.append(Happening(*entry["mark"]))
            else:
                iterations.append(_iteration(entry))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"line {place} is not of a scheduler trace: {error}") from None
    return Trace(tuple(iterations), tuple(marks))


def _mark_line(mark: Happening) -> str:
    return json.dumps({"mark": mark}, separators=(",", ":"))


def _iteration(entry: dict[str, Any]) -> Iteration:
    steps = [
        TracedStep(**{**step, "rows": tuple(TracedRow(*row) for row in step["rows"])})
        for step in entry["steps"]
    ]
    return Iteration(
        **{
            **entry,
            "phases": tuple(Phase(*phase) for phase in entry["phases"]),
            "steps": tuple(steps),
            "happenings": tuple(Happening(*each) for each in entry["happenings"]),
        }
    )
