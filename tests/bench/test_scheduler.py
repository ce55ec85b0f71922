"""`bench scheduler`, `bench itl` and `bench timeline`, each as small as it can be."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING
from xml.etree import ElementTree

import pytest

from qwen3_asgi.bench.drawing import COLOURS, Window, lives, timeline
from qwen3_asgi.bench.figures import Spread
from qwen3_asgi.cli import main
from qwen3_asgi.scheduler.trace import SchedulerTrace, from_json_lines, to_json_lines
from tests.scheduler.harness import Harness

if TYPE_CHECKING:
    from pathlib import Path

    from qwen3_asgi.scheduler.trace import Trace

SMALL = [
    "--live",
    "1",
    "8",
    "120",
    "--max-active",
    "8",
    "--rounds",
    "2",
    "--iterations",
    "3",
    "--sweeps",
    "1",
]


def test_every_scene_is_measured_with_and_without_metrics(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["bench", "scheduler", "--json", *SMALL]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    scenes = [(row["kind"], row["live"], row["active"], row["metrics"]) for row in rows]
    assert scenes == [
        *(
            ("iteration", n, a, m)
            for m in (False, True)
            for n, a in ((1, 1), (8, 8), (120, 120), (120, 8))
        ),
        *(("sweep", 120, a, m) for a in (8, 120) for m in (False, True)),
    ]
    assert {row["dropped"] for row in rows if row["kind"] == "sweep"} == {120 - 96}
    for row in rows:
        assert 0 < row["wall"]["min"] <= row["wall"]["median"] <= row["wall"]["p90"]
        assert set(row["cpu"]) == set(Spread.__slots__)


def test_the_table_names_its_scenes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "scheduler", *SMALL]) == 0
    out = capsys.readouterr().out
    assert "8 active, 112 waiting" in out
    assert "sweep of 24: 120 active, 0 waiting" in out


@pytest.mark.torch
def test_the_time_between_tokens_is_taken_of_the_clients(
    capsys: pytest.CaptureFixture[str],
) -> None:
    small = ["-n", "2", "--prompt-tokens", "200", "--chunk-tokens", "64", "--prompts", "2"]
    assert main(["bench", "itl", "--json", *small]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["overlap"] for row in rows] == [False, True]
    for row in rows:
        assert row["undisturbed"]["tokens"] >= 2 * 300
        assert row["arriving"]["p50"] <= row["arriving"]["p99"] <= row["arriving"]["max"]
        assert row["bound"] == pytest.approx(
            2 * row["undisturbed"]["p50"] + row["longest_chunk"], abs=0.01
        )
        assert row["ratio"] == pytest.approx(row["arriving"]["p99"] / row["bound"])
        assert 0 < row["chunk"] <= row["longest_chunk"]
    # Two prompts of four chunks each, and a client gets a token with each of them.
    assert rows[0]["arriving"]["tokens"] >= 2 * 2 * 4
    assert main(["bench", "itl", "--overlap", "on", *small]) == 0
    out = capsys.readouterr().out
    assert "p99 / bound" in out


@pytest.mark.torch
@pytest.mark.parametrize("overlap", [[], ["--overlap"]], ids=["one lane", "two lanes"])
def test_a_timeline_is_recorded_saved_and_drawn_again(
    overlap: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    svg, lines, again = tmp_path / "a.svg", tmp_path / "a.jsonl", tmp_path / "b.svg"
    small = ["--prompt-tokens", "160", "--chunk-tokens", "16", *overlap]
    assert main(["bench", "timeline", str(svg), "--save", str(lines), *small]) == 0
    trace = from_json_lines(lines.read_text().splitlines())
    ends = {life.name: (life.reason, life.swept_from) for life in lives(trace)}
    assert ends["long prompt"] == ("length", "")
    assert ends["queued"] == ("abort", "deferred")
    assert ends["client 1"][0] == "abort"
    assert "warm-up" not in ends
    assert main(["bench", "timeline", str(again), "--from", str(lines)]) == 0
    assert again.read_text() == svg.read_text()
    assert "iterations" in capsys.readouterr().out


def recorded() -> Trace:
    """A request that finishes, one that is swept and one that never gets in."""
    trace = SchedulerTrace()
    harness = Harness(
        observer=trace, trace=trace.phase, clock=trace._clock, max_batch=2, max_prefill_tokens=8
    )
    for name, length in (("<first>", 3), ("second", 20), ("third", 5)):
        trace.mark("submit", name)
        harness.submit(name, length, max_tokens=4)
    harness.step(2)
    for name in ("second", "third"):
        trace.mark("disconnect", name)
        harness.cancel(name)
    harness.run()
    return trace.read()


def test_the_picture_shows_who_left_and_from_where() -> None:
    picture = timeline(recorded(), "three requests")
    root = ElementTree.fromstring(picture)
    texts = ["".join(each.itertext()) for each in root.findall(".//{*}text")]
    for name in ("scheduler", "steps", "<first>", "second", "third"):
        assert name in texts
    assert texts.count("hung up▼") == 2
    assert "abort, swept from prefilling✕" in texts
    assert "abort, swept from deferred✕" in texts
    assert "length●" in texts
    assert any("2 requests swept" in text for text in texts)
    fills = [each.get("fill") for each in root.findall(".//{*}path")]
    for kind in ("scheduler", "sweep", "prefill", "decode", "mixed", "waiting"):
        assert COLOURS[kind] in fills, kind


def test_only_the_window_is_drawn() -> None:
    trace = recorded()
    last = trace.iterations[-1]
    picture = timeline(trace, "the end", Window(last.begin, last.end))
    assert "1 iterations" in picture
    assert "swept from" not in picture
    with pytest.raises(ValueError, match="no iteration there"):
        timeline(trace, "nothing", Window(last.end + 1, last.end + 2))


def test_what_is_no_trace_is_not_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    svg, lines = tmp_path / "a.svg", tmp_path / "a.jsonl"
    for text in ("", "no json\n"):
        lines.write_text(text)
        assert main(["bench", "timeline", str(svg), "--from", str(lines)]) == 2
    assert main(["bench", "timeline", str(svg), "--from", str(tmp_path / "none")]) == 2
    assert capsys.readouterr().err.count("nothing to draw") == 3
    assert not svg.exists()


def test_json_lines_of_a_real_run_are_read_back() -> None:
    trace = recorded()
    assert from_json_lines(to_json_lines(trace)) == trace
