"""The benchmark of the tiers measures what it says: each prefix comes from where it should."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from qwen3_asgi.bench.tiers import TiersOptions, TiersReport, run_tiers, table
from qwen3_asgi.cli import main

SMALL = ["--prompt-tokens", "70", "--repeats", "2", "--host-gib", "0.01", "--file-gib", "0.01"]


def test_every_place_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "tiers", *SMALL, "--device", "cpu", "--json"]) == 0
    report = TiersReport(**json.loads(capsys.readouterr().out))
    assert (report.prompt_tokens, report.cached_tokens) == (70, 64)
    lines = table(report).splitlines()
    assert lines[0].startswith("tiny: TTFT of 70 tokens, 64 of them in full blocks")
    places = ["device cache", "host memory", "file", "file", "recomputed"]
    assert all(map(str.startswith, lines[1:], places))
    times = [value for name, value in asdict(report).items() if name.endswith("_ms")]
    assert len(times) == len(places)
    assert all(time > 0 for time in times)


def test_tiers_that_are_too_small_are_no_measurement() -> None:
    options = TiersOptions(device="cpu", prompt_tokens=70, repeats=1, host_gib=0.0002)
    with pytest.raises(ValueError, match="give the tiers more room"):
        run_tiers(options)
