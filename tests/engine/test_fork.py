"""A fork: the child has the engine's object and none of its threads; the parent notices nothing.

Each test runs one scene of `fork_scenes.py` in a process of its own.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.engine.engines import expected

ROOT = Path(__file__).parents[2]
FORKED = "EngineDead: the engine was started before this process was forked"
FIVE = expected([1, 2, 3], 5)

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")


def play(scene: str) -> dict[str, Any]:
    process = subprocess.Popen(
        [sys.executable, "-W", "error", "-m", "tests.engine.fork_scenes", scene],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        stdout, stderr = process.communicate(timeout=90)
    finally:
        with suppress(ProcessLookupError):  # a child that hangs would outlive its parent
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert process.returncode == 0, stderr
    # A hook that fails is only printed.
    assert "Traceback" not in stderr, stderr
    seen: dict[str, Any] = json.loads(stdout)
    return seen


@pytest.fixture(scope="module")
def started() -> dict[str, Any]:
    return play("started")


def test_every_use_in_the_child_says_that_the_engine_was_started_before_the_fork(
    started: dict[str, Any],
) -> None:
    child = started["child"]
    for use in ("use", "use on a loop", "start on first use", "inherited handle"):
        assert child[use].startswith(FORKED), use
        assert "start it in each worker" in child[use]


def test_in_the_child_probes_fail_and_the_gauges_are_at_zero(started: dict[str, Any]) -> None:
    child = started["child"]
    assert (child["state"], child["load"], child["gauge"]) == ("dead", 0, 0.0)
    http = child["http"]
    assert (http["/health"], http["/ready"], http["/load"]) == (503, 503, 0)
    assert http["completion"]["error"]["code"] == "engine_dead"
    assert "before this process was forked" in http["completion"]["error"]["message"]


def test_an_explicit_start_in_the_child_begins_a_clean_engine(started: dict[str, Any]) -> None:
    assert started["child"]["restarted"] == ["ready", FIVE, 0.0]
    assert started["child"]["stopped"] == "stopped"


def test_the_child_ends_without_waiting_for_the_parents_thread(started: dict[str, Any]) -> None:
    assert started["child"]["exit"] == 0


def test_the_parent_goes_on_undisturbed(started: dict[str, Any]) -> None:
    assert started["parent gauge"] == 1.0
    assert started["parent"] == ["ready", expected([1, 2, 3], 9), FIVE, True]


def test_locks_that_other_threads_held_at_the_fork_do_not_hold_up_the_child() -> None:
    child = play("locks")
    assert child.pop("refused").startswith(FORKED)
    assert child == {"ids": FIVE, "scrape": 0.0, "shared": True, "exit": 0}


def test_an_engine_that_was_only_constructed_is_as_new_in_every_child() -> None:
    seen = play("constructed")
    child = {"state": "new", "ids": FIVE, "gauge": 0.0, "calls": 1, "http": 200, "exit": 0}
    assert seen == {"children": [child, child], "parent": ["new", 0, FIVE]}


def test_a_fork_at_any_other_moment_gives_an_engine_that_can_be_started() -> None:
    seen = play("unfinished")
    for moment in ("starting", "draining"):
        assert seen[moment]["state"] == "dead"
        assert seen[moment]["use"].startswith(FORKED)
    assert seen["stopped"]["use"] == "EngineNotReady: the engine is not ready: stopped"
    for moment in ("starting", "draining", "stopped"):
        assert (seen[moment]["restarted"], seen[moment]["exit"]) == (FIVE[:1], 0)
    assert seen["drained"] == 3


def test_blocks_that_both_sides_are_in_are_left_by_each_for_itself() -> None:
    seen = play("blocks")
    assert seen["below"]["use"].startswith(FORKED)
    assert (seen["below"]["state"], seen["below"]["exit"]) == ("dead", 0)
    assert seen["states"] == ["ready", "ready", "stopped"]
    assert (seen["parent"], seen["left"]) == (["ready", FIVE], "stopped")


def test_a_process_of_multiprocessing_restarts_it_by_a_block() -> None:
    seen = play("processes")
    assert seen.pop("refused").startswith(FORKED)
    assert seen == {"ids": FIVE, "exit": 0, "parent": FIVE}


@pytest.mark.torch
def test_the_bundled_model_is_loaded_again_in_the_child_and_says_the_same() -> None:
    seen = play("tiny")
    assert seen.pop("refused").startswith(FORKED)
    assert seen == {"same": True, "parent": True, "exit": 0}
