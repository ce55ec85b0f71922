"""What goes wrong around the loop, and who has to know: the requests concerned, nobody else."""

from __future__ import annotations

import threading
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from qwen3_asgi.errors import EngineDead, GenerationCancelled, GenerationFailed
from qwen3_asgi.scheduler.plan import RequestId, StepPlan, StepResult
from qwen3_asgi.scheduler.request import Request, State
from tests.scheduler.harness import Harness, Record

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from qwen3_asgi.scheduler.events import Event


class Broken(BaseException):
    """Not an Exception: nothing may swallow it."""


def fail_once(harness: Harness, error: BaseException) -> None:
    def before_step(plan: StepPlan) -> None:
        harness.executor.before_step = None
        raise error

    harness.executor.before_step = before_step


def running(names: str = "ab", *, max_tokens: int = 12, **settings: object) -> Harness:
    harness = Harness(**settings)  # type: ignore[arg-type]
    for name in names:
        harness.submit(name, 5, max_tokens=max_tokens)
    harness.step(2)
    return harness


def test_failing_step_ends_its_own_requests_and_the_loop_goes_on() -> None:
    harness = Harness(max_batch=2)
    for name in "abcd":
        harness.submit(name, 5)
    harness.step()
    fail_once(harness, RuntimeError("CUDA error"))
    harness.step()
    for name in "ab":
        end = harness.end(name)
        assert end.reason == "error"
        assert isinstance(end.error, GenerationFailed)
        assert "CUDA error" in str(end.error)
    assert harness.scheduler.load.kv_used_blocks == 0
    assert Counter(harness.executor.dropped) == Counter("ab")
    harness.run()
    for name in "cd":
        assert harness.tokens(name) == harness.expected(name, 4)


def test_every_step_may_fail() -> None:
    harness = Harness(max_batch=1)

    def before_step(plan: StepPlan) -> None:
        raise RuntimeError("no luck")

    harness.executor.before_step = before_step
    for name in "abcd":
        harness.submit(name, 5)
    harness.run()
    assert [harness.end(name).reason for name in "abcd"] == ["error"] * 4


def test_failing_row_ends_only_its_own_request() -> None:
    harness = running("abc")
    harness.executor.row_errors["b"] = "NaN in the logits"
    harness.step()
    assert str(harness.end("b").error) == "NaN in the logits"
    harness.run()
    for name in "ac":
        assert harness.tokens(name) == harness.expected(name, 12)


def test_failing_prefill_chunk_ends_only_its_own_request() -> None:
    harness = Harness(max_prefill_tokens=8)
    harness.submit("a", 3, max_tokens=9)
    harness.submit("long", 30)
    harness.executor.row_errors["long"] = "NaN in the logits"
    harness.run()
    assert harness.end("long").reason == "error"
    assert harness.tokens("a") == harness.expected("a", 9)


def test_row_without_a_token_is_an_error_of_its_request() -> None:
    harness = running()
    step = harness.executor.step

    def forgetful(plan: StepPlan) -> StepResult:
        tokens = dict(step(plan).tokens)
        tokens.pop(RequestId("a"), None)
        return StepResult(tokens)

    harness.executor.step = forgetful  # type: ignore[method-assign]
    harness.run()
    assert "no token" in str(harness.end("a").error)
    assert harness.tokens("b") == harness.expected("b", 12)


def test_failing_drop_does_not_stop_the_loop() -> None:
    harness = running()

    def on_drop(request_id: RequestId) -> None:
        raise RuntimeError("already gone")

    harness.executor.on_drop = on_drop
    harness.cancel("a")
    harness.run()
    assert harness.end("a").reason == "abort"
    assert harness.tokens("b") == harness.expected("b", 12)


class FailingSink(Record):
    """Raises on every second delivery."""

    def deliver(self, events: Sequence[Event]) -> None:
        super().deliver(events)
        if len(self.log) % 2:
            raise RuntimeError("event loop is closed")


def test_failing_sink_does_not_stop_the_loop() -> None:
    sink = FailingSink()
    harness = Harness(sink=sink)
    harness.submit("a", 3, max_tokens=6)
    harness.step(8)
    assert harness.scheduler.load.idle
    assert [event.token.token_id for event in sink.events if event.token] == harness.expected(
        "a", 6
    )


class FailingObserver:
    """Raises whatever is told to it."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        def fail(*args: object, **kwargs: object) -> None:
            raise RuntimeError(name)

        return fail


def test_failing_observer_does_not_stop_the_loop() -> None:
    harness = Harness(observer=FailingObserver(), num_kv_blocks=9)
    for name in "abc":
        harness.submit(name, 3, max_tokens=20)
    harness.step(3)
    harness.cancel("a")
    harness.run()
    assert sum(request.num_preemptions for request in harness.requests.values())
    for name in "bc":
        assert harness.tokens(name) == harness.expected(name, 20)


def end_the_loop(harness: Harness) -> None:
    with pytest.raises(Broken):
        harness.scheduler.run()


@pytest.mark.parametrize("where", ["step", "drop", "drain", "stop_check"])
def test_broken_loop_ends_every_live_request_once(where: str) -> None:
    harness = Harness(max_batch=3)
    error = Broken(where)

    def stop_check(token_id: int) -> str | None:
        if where == "stop_check":
            raise error
        return None

    for name in "abcdef":
        harness.submit(name, 5, max_tokens=20, stop_check=stop_check if name == "b" else None)
    if where != "stop_check":
        harness.step(2)
    match where:
        case "step":
            fail_once(harness, error)
        case "drop":
            harness.executor.on_drop = lambda request_id: _raise_once(harness, error)
            harness.cancel("b")
        case "drain":
            harness.submit("g", 5)
            harness.scheduler._arrived.extend(harness.scheduler._inbox.take_commands())
            harness.scheduler._trace = lambda phase: _raise(error)
    end_the_loop(harness)
    harness.check_idle()
    reasons = {name: harness.end(name) for name in harness.requests}
    for name, end in reasons.items():
        if (where, name) != ("drop", "b"):
            assert isinstance(end.error, EngineDead), name
    assert harness.scheduler.load.idle


def _raise(error: BaseException) -> None:
    raise error


def _raise_once(harness: Harness, error: BaseException) -> None:
    harness.executor.on_drop = None
    raise error


def test_broken_loop_refuses_new_requests() -> None:
    harness = running()
    fail_once(harness, Broken())
    end_the_loop(harness)
    assert isinstance(harness.end("a").error, EngineDead)
    with pytest.raises(EngineDead):
        harness.scheduler.submit(Request("late", [1, 2, 3]))
    harness.cancel("late", "a")


def test_request_still_in_the_inbox_when_the_loop_breaks_gets_its_end() -> None:
    harness = running()

    def before_step(plan: StepPlan) -> None:
        harness.submit("late", 3)
        raise Broken

    harness.executor.before_step = before_step
    end_the_loop(harness)
    assert isinstance(harness.end("late").error, EngineDead)
    harness.check_idle()


def test_submit_that_races_with_the_end_gets_exactly_one_answer() -> None:
    """Either `submit` raises, or there is one terminal event; from eight threads at once."""
    harness = Harness()
    start = threading.Barrier(9)
    refused: list[str] = []

    def submitter(number: int) -> None:
        start.wait()
        for i in range(50):
            name = f"{number}-{i}"
            try:
                harness.scheduler.submit(Request(name, [1, 2, 3], max_tokens=1))
            except EngineDead:
                refused.append(name)

    threads = [threading.Thread(target=submitter, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    fail_once(harness, Broken())
    harness.submit("first", 3)
    start.wait()
    end_the_loop(harness)
    for thread in threads:
        thread.join(timeout=30)
    answered = [str(event.request_id) for event in harness.record.events if event.finish]
    everyone = ["first", *(f"{number}-{i}" for number in range(8) for i in range(50))]
    assert sorted(answered + refused) == sorted(everyone)


def test_submit_between_the_last_look_and_the_end_gets_its_answer() -> None:
    """The loop closes between `submit`'s check and its put."""
    harness = Harness()
    inbox_put = harness.scheduler._inbox.put
    harness.scheduler.stop()

    def put_late(command: object) -> None:
        harness.scheduler.run()
        inbox_put(command)  # type: ignore[arg-type]

    harness.scheduler._inbox.put = put_late  # type: ignore[method-assign]
    harness.submit("late", 3)
    assert isinstance(harness.end("late").error, GenerationCancelled)


def test_stopped_loop_aborts_what_is_live_and_returns() -> None:
    harness = running("abc")
    harness.scheduler.stop()
    harness.scheduler.run()
    for name in "abc":
        end = harness.end(name)
        assert end.reason == "abort"
        assert isinstance(end.error, GenerationCancelled)
    harness.check_idle()
    with pytest.raises(EngineDead):
        harness.scheduler.submit(Request("late", [1]))


def test_snapshot_says_idle_before_the_last_end_is_told() -> None:
    harness = running("abc")
    fail_once(harness, Broken())
    end_the_loop(harness)
    kinds = [kind for kind, _ in harness.record.log if kind in ("load", "deliver")]
    assert kinds[-2:] == ["load", "deliver"]
    assert harness.record.loads[-1].idle
    assert harness.record.loads[-1].kv_used_blocks == 0


def test_an_executor_that_returns_something_else_fails_only_its_step() -> None:
    harness = running("ab")
    step = harness.executor.step
    harness.executor.step = lambda plan: None  # type: ignore[method-assign,assignment,return-value]
    harness.step()
    harness.executor.step = step  # type: ignore[method-assign]
    for name in "ab":
        assert isinstance(harness.end(name).error, GenerationFailed)
    harness.submit("c", 5)
    harness.run()
    assert harness.tokens("c") == harness.expected("c", 4)


def test_whoever_waits_for_its_parent_gets_an_end_when_the_tiers_end_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A fork is out of its queue for as long as others are admitted past it."""
    harness = Harness(num_kv_blocks=24, host_slots=16)
    scheduler = harness.scheduler
    loading = scheduler._loading
    assert loading is not None
    parent = harness.submit("parent", 30)
    harness.submit("fork", 30, fork_of=parent)
    harness.submit("other", 5)
    scheduler._drain()
    scheduler._queues.put(parent, State.LOADING)

    def broken(request: Request) -> bool:
        raise Broken("the copy thread is gone")

    monkeypatch.setattr(scheduler._admission, "_offer", broken)
    with pytest.raises(Broken):
        scheduler.run()
    assert {harness.end(name).reason for name in ("parent", "fork", "other")} == {"error"}


@pytest.mark.parametrize("overlap", [False, True], ids=["", "overlap"])
def test_a_result_that_is_none_fails_its_step_and_says_so(
    overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = Harness(overlap=overlap)
    harness.submit("a", 5)
    monkeypatch.setattr(harness.executor, "step", lambda plan: None)
    harness.step()
    harness.land()
    harness.step()
    assert harness.end("a").reason == "error"
    assert "the executor returned NoneType, no StepResult" in str(harness.end("a").error)
    monkeypatch.undo()
    harness.submit("b", 5)
    harness.run_all()
    assert harness.tokens("b") == harness.expected("b", 4)
