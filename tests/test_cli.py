"""The command line as a newcomer uses it, on the bundled model."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from qwen3_asgi import __version__
from qwen3_asgi.cli import main

STORM = ["--clients", "4", "--prompt-words", "120", "--max-tokens", "400", "--repeat", "1"]


def run(*arguments, text=None):
    return subprocess.run(
        [sys.executable, "-m", "qwen3_asgi.cli", *arguments],
        input=text,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_version(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.strip() == f"qwen3-asgi {__version__}"


@pytest.mark.torch
def test_chat_answers_and_remembers():
    questions = "What is the capital of France?\n\nAnd of Italy?\n"
    ended = run("chat", "tiny", "--no-thinking", "--temperature", "0", text=questions)
    assert ended.returncode == 0, ended.stderr
    assert "Paris" in ended.stdout
    assert "Rome" in ended.stdout
    assert "Traceback" not in ended.stderr


@pytest.mark.torch
def test_a_model_that_is_not_there_is_one_clear_line(tmp_path):
    ended = run("serve", str(tmp_path))
    assert ended.returncode == 1
    assert ended.stderr.startswith("qwen3-asgi: ")
    assert "config.json" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_storm_on_a_running_server_is_reported(tiny_server, capsys):
    assert main(["bench", "storm", tiny_server.url, "--kind", "stream", "--json", *STORM]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["clients"] == 4
    assert report["running_before"] + report["waiting_before"] == 4
    assert report["kv_used_blocks_after"] == 0
    # After the poll that saw all four running: a few steps at most, not the 400 of each.
    assert report["steps_to_idle"] < 100
    assert report["lone_ttft_ms"] > 0
    assert report["follow_up_ttft_ms"] > 0
    assert tiny_server.wait_idle()["num_running"] == 0


@pytest.mark.torch
def test_a_storm_in_this_process_is_reported_as_a_table():
    ended = run("bench", "storm", "--in-process", *STORM)
    assert ended.returncode == 0, ended.stderr
    for row in ("hang-up to 0/0", "forward passes until 0/0", "tokens computed for gone clients"):
        assert row in ended.stdout


@pytest.mark.parametrize("arguments", [[], ["http://127.0.0.1:1", "--in-process"]])
def test_a_storm_needs_one_target(arguments, capsys):
    assert main(["bench", "storm", *arguments]) == 2
    assert "--in-process" in capsys.readouterr().err


def test_a_storm_on_a_server_that_is_not_there_is_one_clear_line(capsys):
    assert main(["bench", "storm", "http://127.0.0.1:1"]) == 1
    assert "127.0.0.1:1" in capsys.readouterr().err
