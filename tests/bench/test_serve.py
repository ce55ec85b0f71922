"""`bench serve` on real servers with the fake engine, and on servers that lie, refuse and drop."""

from __future__ import annotations

import json
import threading
import xml.etree.ElementTree as ET
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from qwen3_asgi.bench.serve_work import Length, draw_lengths, poisson
from qwen3_asgi.bench.storm_server import storm_server
from qwen3_asgi.cli import main

SMALL = ["--model", "fake", "--prompt-tokens", "24", "--output-tokens", "4", "--rounds", "2"]


def bench(capsys, *arguments):
    assert main(["bench", "serve", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_counts_of_a_closed_loop_add_up(capsys, tmp_path):
    svg = tmp_path / "chart.svg"
    report = bench(capsys, "--server", "uvicorn", *SMALL, "-n", "1", "3", "--svg", str(svg))
    assert [row["clients"] for row in report["rows"]] == [1, 3]
    for row in report["rows"]:
        assert (row["errors"], len(row["rounds"])) == (0, 2)
        for each in row["rounds"]:
            assert each["requests"] == each["answered"] == 4 * row["clients"]
            assert each["output_tokens"] == 4 * each["requests"]
            assert each["cut_short"] == 0
            rate = each["output_tokens"] / each["seconds"]
            assert each["output_tokens_per_second"] == pytest.approx(rate, rel=0.01)
            assert 0 < each["ttft_ms"]["p50"] <= each["ttft_ms"]["p95"] <= each["ttft_ms"]["p99"]
            assert each["latency_ms"]["p99"] >= each["ttft_ms"]["p99"]
    assert report["no_usage"] == []
    assert len(list(ET.parse(svg).getroot())) > 5


def test_prompts_have_the_length_that_was_asked_for(capsys):
    options = ["--server", "uvicorn", *SMALL[:2], "--output-tokens", "1", "--rounds", "1"]
    report = bench(capsys, *options, "--prompt-tokens", "64", "80-120", "-n", "2")
    for row, low, high in zip(report["rows"], (64, 80), (64, 120), strict=True):
        each = row["rounds"][0]
        mean = each["prompt_tokens"] / each["answered"]
        assert low * 0.75 <= mean <= high * 1.25


def test_servers_take_turns_and_ratios_are_of_medians(capsys):
    with storm_server("fake", None) as ours, storm_server("fake", None) as theirs:
        report = bench(capsys, ours, "--compare", theirs, *SMALL, "-n", "2")
        ours_row, theirs_row = report["rows"]
        assert (ours_row["server"], theirs_row["server"]) == (ours, theirs)
        assert [each["turn"] for each in ours_row["rounds"]] == [0, 3]
        assert [each["turn"] for each in theirs_row["rounds"]] == [1, 2]
        (ratio,) = report["ratios"]
        for name in ("output_tokens_per_second", "ttft_ms_p50"):
            assert ratio[name] == pytest.approx(ours_row[name] / theirs_row[name], abs=0.002)
        assert main(["bench", "serve", ours, "--compare", theirs, *SMALL, "-n", "2"]) == 0
        assert f"{ours} / {theirs}, load 2, prompt 24: output tok/s" in capsys.readouterr().out


def test_each_server_is_asked_for_the_model_that_it_lists(capsys):
    asked = []

    def script(body, number):
        asked.append(body["model"])
        return 200, GOOD

    with odd_server(script) as (_, theirs):
        report = bench(
            capsys,
            "--server",
            "uvicorn",
            "--compare",
            theirs,
            *SMALL[:4],
            "-n",
            "1",
            "--rounds",
            "1",
        )
    ours = report["rows"][0]["server"]
    assert report["models"] == {ours: "fake", theirs: "listed"}
    assert set(asked) == {"listed"}


def test_arrivals_are_reported_by_their_rate(capsys):
    options = ["--rate", "200", "--requests", "6", "--api", "chat"]
    report = bench(capsys, "--server", "uvicorn", *SMALL, *options)
    (row,) = report["rows"]
    assert (row["rate"], row["clients"]) == (200, None)
    assert [each["answered"] for each in row["rounds"]] == [6, 6]
    assert [each["output_tokens"] for each in row["rounds"]] == [24, 24]


# ---- servers that are not what they should be ----


class Odd(BaseHTTPRequestHandler):
    """What to answer is the server's own `script`: a function of the body and its number."""

    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"data": [{"id": "listed"}]}')

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append(body)
        status, said = self.server.script(body, len(self.server.bodies))
        self.send_response(status)
        self.end_headers()
        self.wfile.write(said)

    def log_message(self, *arguments):
        pass


@contextmanager
def odd_server(script):
    with ThreadingHTTPServer(("127.0.0.1", 0), Odd) as server:
        server.script, server.bodies = script, []
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server, f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


TOKEN = b'data: {"choices": [{"text": "a"}]}\n\n'
GOOD = TOKEN + b"data: [DONE]\n\n"


def test_errors_are_counted_by_kind(capsys):
    def script(body, number):
        if number > 3 and number % 2:  # the first two are the questions, one is the warm-up
            return (503, b"busy") if number % 4 == 1 else (200, TOKEN)
        return 200, GOOD

    with odd_server(script) as (server, url):
        report = bench(capsys, url, "--model", "x", "-n", "1", "--requests", "8", "--rounds", "1")
        server.bodies.clear()
        assert main(["bench", "serve", url, "--model", "x", "-n", "1", "--rounds", "1"]) == 0
    (each,) = report["rows"][0]["rounds"]
    assert each["errors"] == {"http 503": 2, "dropped": 2}
    assert each["requests"] == each["answered"] + sum(each["errors"].values()) == 8
    out = capsys.readouterr().out
    assert "x dropped" in out
    assert "an event is taken for a token" in out


@pytest.mark.parametrize(("load", "waits"), [(["--rate", "500"], False), (["-n", "1"], True)])
def test_arrivals_do_not_wait_for_answers(load, waits, capsys):
    came = threading.Event()

    def script(body, number):
        if number == 5:
            came.set()
        # The second request of the round comes while the first is held, or never does.
        held = number == 4 and not came.wait(1 if waits else 10)
        return (500, b"alone") if held else (200, GOOD)

    options = ["--model", "x", "--requests", "2", "--rounds", "1"]
    with odd_server(script) as (_, url):
        report = bench(capsys, url, *options, *load)
    assert report["rows"][0]["rounds"][0]["errors"] == ({"http 500": 1} if waits else {})


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ((200, TOKEN), "dropped"),
        ((200, b"<html>\n"), "malformed"),
        ((500, b"broken"), "http 500: broken"),
        ((200, b'data: {"choices": [], "usage": {"completion_tokens": 99}}\n\n' + GOOD), "99"),
    ],
)
def test_a_server_that_answers_nothing_is_one_clear_line(answer, words, capsys):
    with odd_server(lambda body, number: answer) as (_, url):
        assert main(["bench", "serve", url, "--model", "x"]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert url in error
    assert words in error


def test_a_server_that_fails_under_load_is_one_clear_line(capsys):
    with odd_server(lambda body, number: (200, GOOD if number < 3 else TOKEN)) as (_, url):
        assert main(["bench", "serve", url, "--model", "x", "-n", "2"]) == 1
    error = capsys.readouterr().err
    assert f"{url} answered none of 2 requests: 2 x dropped" in error
    assert error.count("\n") == 1


def test_fields_that_are_refused_are_left_out_and_told(capsys):
    def script(body, number):
        return (422, b"ignore_eos?") if "ignore_eos" in body else (200, GOOD)

    with odd_server(script) as (server, url):
        report = bench(
            capsys, url, "--model", "x", "-n", "1", "--rounds", "1", "--extra", '{"k":1}'
        )
        assert report["refused"] == {url: ["ignore_eos"]}
        assert all(body["k"] == 1 for body in server.bodies)
        assert ["ignore_eos" in body for body in server.bodies].count(True) == 1
    assert server.bodies[-1]["stream_options"] == {
        "include_usage": True,
        "continuous_usage_stats": True,
    }


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-n", "0"], "--clients must be more than 0, got 0"),
        (["--rate", "-1"], "--rate must be more than 0, got -1"),
        (["--prompt-tokens", "9-3"], "LOW at most HIGH, got '9-3'"),
        (["--output-tokens", "x"], "got 'x'"),
        (["--extra", "[]"], "--extra must be a JSON object, got '[]'"),
        (["--dtype", "float32"], "engine options are for --server"),
    ],
)
def test_bad_input_is_one_clear_line(arguments, words, capsys):
    assert main(["bench", "serve", "http://127.0.0.1:1", "--model", "x", *arguments]) == 1
    assert words in capsys.readouterr().err


def test_nobody_there_is_one_clear_line(capsys):
    assert main(["bench", "serve", "http://127.0.0.1:1", "--model", "x"]) == 1
    assert "refused" in capsys.readouterr().err
    assert main(["bench", "serve"]) == 2


def test_lengths_and_arrivals_follow_the_seed():
    lengths = [draw_lengths(50, Length(8, 64), Length(1, 9), salt) for salt in (1, 1, 2)]
    assert lengths[0] == lengths[1] != lengths[2]
    assert all(8 <= prompt <= 64 and 1 <= output <= 9 for prompt, output in lengths[0])
    assert len({prompt for prompt, _ in lengths[0]}) > 10
    moments = poisson(2000, 50.0, 3)
    assert moments == sorted(moments)
    assert moments == poisson(2000, 50.0, 3)
    assert moments[-1] / 1999 == pytest.approx(1 / 50, rel=0.1)
