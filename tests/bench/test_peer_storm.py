"""`bench storm --compare`: a server that aborts, and one that works on for nobody."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from qwen3_asgi.bench.processes import PROC, cpu_seconds, listener_pid
from qwen3_asgi.cli import main
from tests.bench import bad_peer

pytestmark = pytest.mark.skipif(not PROC.exists(), reason="processes are read from /proc")

CLIENTS, TOKENS = 4, 20


@contextmanager
def bad_server():
    """Its process and its URL."""
    with subprocess.Popen(
        [sys.executable, str(Path(bad_peer.__file__))], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process.pid, f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.kill()


def storm(capsys, *arguments):
    sizes = ["-n", str(CLIENTS), "--prompt-words", "20", "--max-tokens", str(TOKENS)]
    quick = ["--kind", "plain", "--hang-up-after", "0.05", "--repeat", "1"]
    assert main(["bench", "storm", *sizes, *quick, *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_who_ignores_a_hang_up_is_found_out(capsys):
    with bad_server() as (pid, url):
        # `fake` has steps of 10 ms that cost nothing: what it uses is for HTTP.
        report = storm(capsys, "--server", "uvicorn", "--model", "fake", "--compare", url)
    ours, theirs = report["rows"]
    assert (theirs["server"], theirs["pid"], theirs["model"]) == (url, pid, "bad")
    assert (ours["model"], ours["kind"], theirs["kind"]) == ("fake", "plain", "plain")
    # All that was asked for is computed after the hang-up, but what was before it.
    least = (CLIENTS - 1) * TOKENS * bad_peer.TOKEN_CPU_SECONDS
    assert theirs["wasted_cpu_seconds"] >= least
    assert theirs["follow_up_seconds"] - theirs["lone_seconds"] >= least
    assert theirs["idle_after_seconds"] >= theirs["follow_up_seconds"]
    # Never by the clock: ours, on a busy machine, may take its time, but not CPU time.
    assert ours["wasted_cpu_seconds"] < least / 2
    for row in report["rows"]:
        ratio = row["follow_up_seconds"] / row["lone_seconds"]
        assert row["follow_up_ratio"] == pytest.approx(ratio, rel=0.02)
        (each,) = row["rounds"]
        assert each["cpu_after"] == row["cpu_after_seconds"]


def test_servers_take_turns_in_both_kinds_of_storms(capsys):
    with bad_server() as (pid, url):
        more = ["--kind", "both", "--compare", url, "--compare-pid", str(pid)]
        report = storm(capsys, url, "--pid", str(pid), *more)
    assert [row["kind"] for row in report["rows"]] == ["plain", "plain", "stream", "stream"]


def test_a_table_for_a_person(capsys):
    with bad_server() as (_, url):
        quick = ["--kind", "stream", "--max-tokens", "20", "--hang-up-after", "0.05"]
        arguments = [url, "--compare", url, "-n", "2", "--repeat", "1", *quick]
        assert main(["bench", "storm", *arguments]) == 0
    out = capsys.readouterr().out
    for words in ("2 stream", "for nobody", "hung up after 0.05 s", f"{url}  "):
        assert words in out


def test_clients_that_are_answered_are_no_storm(capsys):
    with bad_server() as (_, url):
        arguments = ["--max-tokens", "1", "-n", "2", "--hang-up-after", "60", "--repeat", "1"]
        assert main(["bench", "storm", url, "--compare", url, *arguments]) == 1
    error = capsys.readouterr().err
    assert f"{url} answered" in error
    assert "raise --max-tokens" in error


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--compare-pid", "1", "2"], "--compare-pid has 2 processes for 1 servers"),
        (["--clients", "0"], "--clients must be more than 0, got 0"),
        (["--hang-up-after", "-1"], "--hang-up-after must be more than 0, got -1"),
        (["--pid", "99999999"], "no process 99999999"),
    ],
)
def test_bad_input_is_one_clear_line(arguments, words, capsys):
    with bad_server() as (_, url):
        assert main(["bench", "storm", url, "--compare", url, *arguments]) == 1
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("more", [["--in-process"], ["http://x", "--random-hang-up", "1"]])
def test_what_does_not_go_together_is_refused(more, capsys):
    assert main(["bench", "storm", *more, "--compare", "http://y"]) == 2
    assert "--compare goes with neither" in capsys.readouterr().err


def test_cpu_time_is_of_a_process_and_its_descendants():
    spend = "import time\nwhile time.thread_time() < 0.3: pass\nprint(1, flush=True); input()"
    nested = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"
    before = cpu_seconds(os.getpid())
    with subprocess.Popen(
        [sys.executable, "-c", nested, spend],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout.readline() == "1\n"
        assert cpu_seconds(process.pid) >= 0.25
        assert cpu_seconds(os.getpid()) - before >= 0.25
        process.stdin.close()
        process.wait()
        # What is gone and was waited for has been spent all the same.
        assert cpu_seconds(os.getpid()) - before >= 0.25
    with pytest.raises(ValueError, match=f"no process {process.pid}"):
        cpu_seconds(process.pid)


def test_the_process_that_listens_is_found_by_its_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert listener_pid(port) == os.getpid()
    with pytest.raises(ValueError, match=f"listens on port {port}: give its pid"):
        listener_pid(port)
