"""The record of the loop: what is in it, what it leaves out, and its way through JSON lines."""

from __future__ import annotations

from itertools import count, pairwise

import pytest

from qwen3_asgi.metrics.observers import Observers
from qwen3_asgi.scheduler.trace import (
    Iteration,
    SchedulerTrace,
    Trace,
    from_json_lines,
    to_json_lines,
)
from tests.scheduler.harness import Harness


def traced(max_iterations: int = 100, **settings: object) -> tuple[Harness, SchedulerTrace]:
    """A harness and its trace, on one clock."""
    ticks = count(1)

    def clock() -> float:
        return float(next(ticks))

    trace = SchedulerTrace(max_iterations, clock=clock)
    settings = {"observer": trace} | settings
    return Harness(clock=clock, trace=trace.phase, **settings), trace  # type: ignore[arg-type]


def whats(iteration: Iteration) -> list[tuple[str, str, str]]:
    return [(each.what, each.request, each.detail) for each in iteration.happenings]


def test_an_iteration_has_its_phases_steps_and_requests() -> None:
    harness, trace = traced()
    harness.submit("a", 3, max_tokens=2)
    harness.submit("b", 5, max_tokens=9)
    harness.step(2)
    harness.cancel("b")
    harness.step()
    first, second, third = trace.read().iterations

    assert [phase.name for phase in first.phases] == [
        *("drain", "sweep", "publish", "admit", "plan", "execute", "resolve", "deliver"),
    ]
    assert (first.number, first.num_running, first.num_waiting) == (1, 2, 0)
    (step,) = first.steps
    assert (step.number, step.kind, step.num_tokens) == (1, "prefill", 8)
    assert [tuple(row) for row in step.rows] == [("a", "prefill", 3), ("b", "prefill", 5)]
    assert whats(first) == [("admit", "a", ""), ("admit", "b", "")]
    assert [(row.request, row.num_tokens) for row in second.steps[0].rows] == [("a", 1), ("b", 1)]
    assert whats(second) == [("finish", "a", "length")]
    assert (second.num_running, second.num_swept) == (1, 0)
    assert whats(third) == [("cancel", "b", "active"), ("finish", "b", "abort")]
    assert (third.num_running, third.num_swept, third.steps) == (0, 1, ())
    assert third.kv_used_blocks == 0 < second.kv_used_blocks


def test_phases_follow_one_another_without_a_gap_and_hold_what_happened() -> None:
    harness, trace = traced(overlap=True, max_prefill_tokens=4)
    harness.submit("a", 3, max_tokens=6)
    harness.submit("b", 9, max_tokens=3)
    harness.run_all()
    iterations = trace.read().iterations
    assert any(phase.name == "poll" for each in iterations for phase in each.phases)
    for each, after in pairwise(iterations):
        assert each.begin < each.end == after.begin
    for each in iterations:
        assert [phase.name for phase in each.phases].count("drain") == 1
        edges = [each.begin, *(phase.end for phase in each.phases)]
        assert [phase.begin for phase in each.phases] == edges[:-1]
        assert edges[-1] == each.end
        assert edges == sorted(set(edges))
        assert all(each.begin <= happening.at <= each.end for happening in each.happenings)
    rows = [row for each in iterations for step in each.steps for row in step.rows]
    assert sum(row.num_tokens for row in rows if row.kind == "prefill") == 3 + 9
    assert sum(row.num_tokens for row in rows if row.kind == "decode") == (6 - 1) + (3 - 1)


def test_what_the_scheduler_itself_took_is_without_the_step() -> None:
    harness, trace = traced()
    harness.submit("a", 3, max_tokens=1)
    harness.step()
    (only,) = trace.read().iterations
    execute = next(phase for phase in only.phases if phase.name == "execute")
    assert only.own_seconds == only.end - only.begin - (execute.end - execute.begin)


def test_a_failed_step_says_so() -> None:
    harness, trace = traced()

    def fail(plan: object) -> None:
        raise RuntimeError("boom")

    harness.executor.before_step = fail
    harness.submit("a", 3)
    harness.step()
    (step,) = trace.read().iterations[0].steps
    assert step.error == "RuntimeError('boom')"
    assert whats(trace.read().iterations[0])[-1] == ("finish", "a", "error")


def test_only_the_last_iterations_are_kept() -> None:
    harness, trace = traced(max_iterations=4)
    harness.submit("a", 3, max_tokens=30)
    harness.step(20)
    for i in range(9):
        trace.mark("note", str(i))
    kept = trace.read()
    assert [each.number for each in kept.iterations] == [16, 17, 18, 19, 20]
    assert [mark.request for mark in kept.marks] == ["5", "6", "7", "8"]


def test_json_lines_are_the_trace() -> None:
    harness, trace = traced(overlap=True)
    harness.submit("a", 3, max_tokens=3)
    harness.step()
    trace.mark("disconnect", "a", "streaming")
    harness.cancel("a")
    harness.run_all()
    read = trace.read()
    lines = list(to_json_lines(read))
    assert len(lines) == len(read.iterations) + 1
    place = next(i for i, line in enumerate(lines) if "disconnect" in line)
    assert 0 < place < len(lines) - 1, "not in the order of time"
    assert all("\n" not in line for line in lines)
    assert from_json_lines(lines) == read
    assert from_json_lines([]) == Trace((), ())


@pytest.mark.parametrize("line", ["[]", "{}", "no json", '{"mark": 3}', '{"number": 1}', "3"])
def test_other_lines_are_refused(line: str) -> None:
    with pytest.raises(ValueError, match="line 1 is not of a scheduler trace"):
        from_json_lines([line])


def test_an_observer_that_fails_costs_the_others_nothing(caplog: pytest.LogCaptureFixture) -> None:
    class Failing:
        def __getattr__(self, name: str) -> object:
            raise RuntimeError(name)

    seen = SchedulerTrace()
    harness, trace = traced(observer=Observers(Failing(), seen))  # type: ignore[arg-type]
    seen.phase("drain")
    harness.submit("a", 3, max_tokens=1)
    harness.step()
    assert whats(seen.read().iterations[0]) == [("admit", "a", ""), ("finish", "a", "length")]
    assert "an observer failed" in caplog.text
    assert Observers.of(trace, None) is trace
