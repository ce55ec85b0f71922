"""`bench startup` in fresh processes: stages in order, which add up to the whole."""

from __future__ import annotations

import json

import pytest

from qwen3_asgi.bench.startup import STAGES
from qwen3_asgi.cli import main

pytestmark = pytest.mark.torch


def test_stages_sum_to_the_start(capsys):
    assert main(["bench", "startup", "--repeat", "1", "--device", "cpu", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert list(report["stages"]) == list(STAGES)
    (start,) = report["starts"]
    assert all(each > 0 for each in start["stages"].values())
    assert sum(start["stages"].values()) == pytest.approx(start["total_ms"])
    assert start["first_token_ms"] > 0


def test_a_start_that_fails_is_one_clear_line(capfd, tmp_path):
    assert main(["bench", "startup", "--model", str(tmp_path), "--repeat", "1"]) == 1
    error = capfd.readouterr().err
    assert "the process did not start" in error
    assert "config.json" in error


def test_no_start_is_no_measurement(capsys):
    assert main(["bench", "startup", "--repeat", "0"]) == 1
    assert "--repeat must be at least 1, got 0" in capsys.readouterr().err
