"""Engines with `EngineConfig(overlap=True)`: every promise of engines without it, and their tokens.

The tests of the modules below are collected here once more, with lanes under each engine.
"""

from __future__ import annotations

import dataclasses
import logging
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from qwen3_asgi.config import EngineConfig, SamplingParams
from qwen3_asgi.engine import lifecycle
from qwen3_asgi.engine.engine import Engine
from qwen3_asgi.engine.loading import load_model
from qwen3_asgi.errors import EngineDead, GenerationCancelled
from qwen3_asgi.scheduler.loop import Scheduler
from qwen3_asgi.testing import assert_idle
from tests.engine import (
    test_bridge,
    test_exit,
    test_generate,
    test_handles,
    test_leaving,
    test_lifecycle,
    test_many_loops,
    test_several_engines,
    test_shared_lifespans,
)
from tests.engine.engines import GUARD_SECONDS, Gate, executor, tokens, toy_engine

if TYPE_CHECKING:
    from types import ModuleType

    from qwen3_asgi.engine.loading import LoadedModel
    from qwen3_asgi.scheduler.plan import StepPlan, StepResult

pytestmark = pytest.mark.anyio

ONCE_MORE: list[ModuleType] = [
    test_bridge,
    test_generate,
    test_handles,
    test_leaving,
    test_lifecycle,
    test_many_loops,
    test_several_engines,
    test_shared_lifespans,
]
# They count on a scheduler that does nothing while a step is held, on one step at a time, or on a
# sweep between a delivery and the next step; with lanes that one has been begun already.
NOT_WITH_LANES = {
    "test_a_second_stop_without_patience_cuts_the_first_short",
    "test_ten_dropped_handles_are_gone_within_two_iterations",
    "test_a_loop_that_closes_with_live_requests_disturbs_no_other",
}

# They count steps, and with pipelined decode one more of them has been launched.
NOT_PIPELINED = {
    "test_a_loop_that_closes_with_a_wake_up_pending_is_noticed",
    "test_each_loop_is_woken_once_per_step_however_many_of_its_streams_have_news",
    "test_what_is_cancelled_in_one_loop_disturbs_no_stream_anywhere",
}

for module in ONCE_MORE:
    globals().update(
        {
            name: value
            for name, value in vars(module).items()
            if name.startswith("test_") and callable(value) and name not in NOT_WITH_LANES
        }
    )
engine, fake = test_leaving.engine, test_leaving.fake  # fixtures


@pytest.fixture(autouse=True, params=[False, True], ids=["", "pipelined"])
def overlap(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[Scheduler]:
    """The schedulers that were made, each with lanes, whatever the engine's configuration says."""
    if request.param and request.function.__name__ in NOT_PIPELINED:
        pytest.skip("it counts steps without pipelined decode")
    made: list[Scheduler] = []

    def overlapping(*args: Any, **settings: Any) -> Scheduler:
        lanes = {"overlap": True, "pipelined": request.param}
        made.append(Scheduler(*args, **{**settings, **lanes}))
        return made[-1]

    monkeypatch.setattr(lifecycle, "Scheduler", overlapping)
    return made


def test_the_configuration_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    for wanted in (False, True):
        with toy_engine(config=EngineConfig(overlap=wanted)) as engine:
            engine.generate_sync(prompt="x", params=tokens(2))
            lanes = [t for t in threading.enumerate() if t.name.endswith(" lane")]
            assert len(lanes) == 2 * wanted
    assert not any(thread.name.endswith(" lane") for thread in threading.enumerate())


# ---- the real model ----

PROMPTS = ["1, 2, 3,", "Once upon a time", "word " * 150, "hello", "x " * 60, "The " * 400]
GREEDY = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
SEEDED = SamplingParams(max_tokens=40, temperature=0.9, seed=7, ignore_eos=True)


class Meeting:
    """The real executor. The first prefill and the first decode that can wait for each other until
    both are on the device, so that steps are known to have overlapped."""

    def __init__(self, executor: Any) -> None:
        self._executor = executor
        self._inside = 0
        self._lock = threading.Lock()
        self.most = 0
        self.ahead = False
        self._met = threading.Event()

    def step(self, plan: StepPlan) -> StepResult:
        with self._lock:
            self._inside += 1
            self.ahead |= plan.behind is not None
            self.most = max(self.most, self._inside)
            if self._inside == 2:
                self._met.set()
        try:
            if plan.kind == "decode" and plan.step > 4:
                self._met.wait(GUARD_SECONDS)
            return self._executor.step(plan)  # type: ignore[no-any-return]
        finally:
            with self._lock:
                self._inside -= 1

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)


def answers(engine: Engine, params: SamplingParams) -> list[tuple[int, ...]]:
    """Each prompt's tokens, all of them at once."""
    handles = [engine.submit_sync(prompt=prompt, params=params) for prompt in PROMPTS]
    said = [
        tuple(token.token_id for batch in handle.read_sync() for token in batch.tokens)
        for handle in handles
    ]
    assert_idle(engine)
    return said


@pytest.mark.torch
@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "sampled"])
def test_the_model_says_the_same_with_and_without(
    params: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    meetings: list[Meeting] = []

    def load(name: str, config: EngineConfig) -> LoadedModel:
        model = load_model(name, config)
        if not config.overlap:
            return model
        meetings.append(Meeting(model.executor))
        return dataclasses.replace(model, executor=meetings[-1])  # type: ignore[arg-type]

    said = []
    for overlap, pipelined in ((False, False), (True, False), (True, True)):
        config = EngineConfig(
            num_kv_blocks=512,
            max_prefill_tokens=64,
            dtype="float32",
            overlap=overlap,
            pipelined=pipelined,
        )
        with Engine("tiny", config, loader=load) as engine:
            said.append(answers(engine, params))
    assert [meeting.most for meeting in meetings] == [2, 2], "no two steps ran at once"
    assert [meeting.ahead for meeting in meetings] == [False, True]
    assert said[0] == said[1] == said[2]
    assert len(set(said[0])) == len(PROMPTS)


# ---- ends ----


def test_stop_ends_what_is_in_flight_on_both_lanes(overlap: list[Scheduler]) -> None:
    fake = executor()
    gate = Gate(fake)
    engine = toy_engine(fake, EngineConfig(max_prefill_tokens=16))
    decoding = engine.submit_sync(prompt="hello", params=tokens(3000))
    gate.held_sync(1)
    gate.allow(1)
    gate.held_sync(2)
    prefilling = engine.submit_sync(prompt="x" * 200, params=tokens(9))
    gate.held_sync(3)
    assert engine.load().num_running == 2
    stopping = threading.Thread(target=lambda: engine.stop_sync(drain=0))
    stopping.start()
    gate.open()
    for handle in (decoding, prefilling):
        with pytest.raises(GenerationCancelled):
            list(handle.read_sync())
    stopping.join(GUARD_SECONDS)
    assert engine.state == "stopped"
    # A step that was launched ahead may begin before the stop is seen.
    ahead = int(overlap[0]._steps._pipelined)
    assert 3 <= len({row.step for row in fake.rows}) <= 3 + ahead
    assert not any(thread.name.endswith(" lane") for thread in threading.enumerate())


def test_a_step_that_is_killed_on_its_lane_kills_the_engine_and_not_the_readers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fake = executor()

    def die(plan: StepPlan) -> None:
        if plan.kind == "decode":
            raise SystemExit(3)

    fake.before_step = die
    engine = toy_engine(fake)
    with caplog.at_level(logging.CRITICAL), pytest.raises(EngineDead):
        engine.generate_sync(prompt="hello", params=tokens(9))
    engine.stop_sync()
    assert not any(thread.name.endswith(" lane") for thread in threading.enumerate())
    fake.before_step = None
    engine.start_sync()
    assert len(engine.generate_sync(prompt="hello", params=tokens(9)).token_ids) == 9
    engine.stop_sync()


WITH_LANES = """
from qwen3_asgi.scheduler.loop import Scheduler
lifecycle.Scheduler = lambda *args, **settings: Scheduler(*args, **{**settings, "overlap": True})
"""
CTRL_C = """
import signal
fake = executor()
gate = Gate(fake)
engine = toy_engine(fake)
first = engine.submit_sync(prompt="x", params=LONG)
gate.held_sync(1)
gate.allow(1)
gate.held_sync(2)
second = engine.submit_sync(prompt="y" * 90, params=LONG)
gate.held_sync(3)
try:
    signal.raise_signal(signal.SIGINT)
except KeyboardInterrupt:
    gate.open()
else:
    raise SystemExit("no interrupt")
"""
SCRIPTS = {
    "Ctrl-C with a step on each lane": CTRL_C,
    **{
        what: test_exit.SCRIPTS[what]
        for what in (
            "live generations that nobody reads",
            "a daemon thread in the middle of a generation",
            "a step that takes for ever",
        )
    },
}


@pytest.mark.parametrize("what", SCRIPTS)
def test_a_program_that_never_stops_its_lanes_ends_by_itself(what: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-c", test_exit.PROLOGUE + WITH_LANES + SCRIPTS[what]],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


def test_pipelined_decode_is_refused_without_lanes() -> None:
    with pytest.raises(ValueError, match="pipelined needs overlap"):
        EngineConfig(pipelined=True)
