"""`bench seam` and `bench bridge`, each as small as it can be: what is measured is reported."""

from __future__ import annotations

import json

import pytest

from qwen3_asgi.bench import bridge, seam
from qwen3_asgi.bench.loops import chosen_loops
from qwen3_asgi.cli import main
from qwen3_asgi.middleware import DisconnectMiddleware

SMALL_SEAM = ["--rounds", "3", "--requests", "5"]
SMALL_BRIDGE = ["--rounds", "2", "--steps", "4", "--readers", "8"]
ALL_LOOPS = list(chosen_loops(None))


def test_every_loop_and_app_has_its_row(capsys):
    assert main(["bench", "seam", "--json", *SMALL_SEAM]) == 0
    report = json.loads(capsys.readouterr().out)
    cells = [(row["loop"], row["app"]) for row in report["rows"]]
    assert cells == [(loop, app) for loop in ALL_LOOPS for app in seam.APPS]
    for row in report["rows"]:
        assert 0 < row["plain"]["min"] <= row["plain"]["median"] <= row["plain"]["p90"]
        # A watcher is started and stopped: that cannot be free, on any machine.
        assert row["app"] != "binding" or row["watched"]["min"] > row["plain"]["min"]


def test_the_middleware_is_what_makes_the_difference(monkeypatch):
    calls = 0
    call = DisconnectMiddleware.__call__

    async def counting(self, scope, receive, send):
        nonlocal calls
        calls += 1
        await call(self, scope, receive, send)

    monkeypatch.setattr(DisconnectMiddleware, "__call__", counting)
    options = seam.SeamOptions(rounds=3, requests=5)
    reports = seam.run_seam(options)
    warm_up = 2
    assert calls == len(reports) * (options.rounds + warm_up) * options.requests


def test_a_difference_is_taken_within_each_pair():
    pairs = [(10.0, 15.0), (100.0, 105.0), (20.0, 25.0)]
    added = seam.Spread.of(b - a for a, b in pairs)
    assert (added.median, added.min, added.p90) == (5.0, 5.0, 5.0)


def test_the_bridge_wakes_a_loop_once_per_step_at_most(capsys):
    assert main(["bench", "bridge", "--json", *SMALL_BRIDGE]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [(row["loop"], row["pace"]) for row in rows] == [
        (loop, pace) for loop in ALL_LOOPS for pace in bridge.PACES
    ]
    for row in rows:
        assert row["readers"] == 8
        assert 0 < row["wakeups_per_step"] <= 1
        assert row["events_per_second"]["median"] > 0
        if row["pace"] == "in step":
            assert row["wakeups_per_step"] == row["reads_per_event"] == 1


def test_the_tables_name_what_they_show(capsys):
    assert main(["bench", "seam", "--loop", "asyncio", *SMALL_SEAM]) == 0
    assert main(["bench", "bridge", "--loop", "trio", *SMALL_BRIDGE]) == 0
    out = capsys.readouterr().out
    for words in ("asyncio, starlette", "added", "trio, 8 readers, in step", "wake-ups/step"):
        assert words in out
    assert "uvloop" not in out


def test_a_loop_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setattr("qwen3_asgi.bench.loops.find_spec", lambda name: None)
    assert chosen_loops(None) == ()
    with pytest.raises(ValueError, match="trio is not installed"):
        chosen_loops("trio")
