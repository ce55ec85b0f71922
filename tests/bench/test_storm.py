"""`bench storm` on real servers with the fake engine, tiny-sized."""

from __future__ import annotations

import json
import random
import socket
import threading
import time
from contextlib import closing

import pytest

from qwen3_asgi.bench.crowd import Crowd
from qwen3_asgi.bench.storm import StormOptions, run_storm
from qwen3_asgi.bench.wire import Probe, Target
from qwen3_asgi.cli import main

SMALL = ["--model", "fake", "-n", "6", "--prompt-words", "20", "--max-tokens", "3000"]


@pytest.mark.parametrize("server", ["uvicorn", "hypercorn"])
def test_random_hang_ups_are_reported(server, capsys):
    spread = ["--random-hang-up", "0.1", "--seed", "3", "--repeat", "2"]
    assert main(["bench", "storm", "--server", server, "--json", *SMALL, *spread]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["clients"], report["random_hang_up"], report["seed"]) == (6, 0.1, 3)
    assert len(report["rounds"]) == report["repeat"] == 2
    for each in report["rounds"]:
        assert each["running_before"] + each["waiting_before"] == 6
        assert each["kv_used_blocks_after"] == each["answered"] == 0
        assert each["iterations_to_idle"] >= each["steps_to_idle"] >= 0
        for name in ("idle_ms", "lone_ttft_ms", "follow_up_ttft_ms", "after_idle_ttft_ms"):
            assert each[name] > 0
    medians = sorted(each["idle_ms"] for each in report["rounds"])
    assert report["idle_ms"] == medians[1]
    ttft = report["follow_up_ttft_ms"] / report["lone_ttft_ms"]
    assert report["follow_up_ratio"] == round(ttft, 2)


def test_a_table_for_a_person(capsys):
    arguments = ["--in-process", "--repeat", "1", "--random-hang-up", "0.05", *SMALL]
    assert main(["bench", "storm", *arguments]) == 0
    out = capsys.readouterr().out
    for words in ("6 (both), hanging up over 0.05 s", "last hang-up to 0/0", "TTFT, sent at 0/0"):
        assert words in out


@pytest.mark.parametrize("option", [["--clients", "0"], ["--repeat", "0"]])
def test_nothing_to_measure_is_one_clear_line(option, capsys):
    assert main(["bench", "storm", "http://127.0.0.1:1", *option]) == 1
    assert "at least one" in capsys.readouterr().err


def test_clients_that_are_answered_at_once_are_no_storm(tiny_server):
    options = StormOptions(clients=64, prompt_words=1, max_tokens=1, repeat=1)
    with pytest.raises(ValueError, match="answered too fast"):
        run_storm(tiny_server.url, options)


# ---- the clients alone ----


def listener():
    return socket.create_server(("127.0.0.1", 0))


def target(server):
    return Target("127.0.0.1", server.getsockname()[1], "")


def test_clients_hang_up_in_turn_and_count_who_was_answered():
    with (
        listener() as server,
        closing(Crowd(target(server), [{"n": i} for i in range(4)])) as crowd,
    ):
        peers = [server.accept()[0] for _ in range(4)]
        peers[3].sendall(b"HTTP/1.1 200 OK\r\n\r\n")
        peers[3].close()
        while crowd.answered == 0:
            crowd.read(1.0)
        assert (len(crowd), crowd.bytes_read) == (3, 19)
        now = time.perf_counter()
        crowd.hang_up_at([now, now])
        assert len(crowd) == 1
        assert [ended(peer) for peer in peers[:2]] == [True, True]
        peers[2].setblocking(False)
        read_request(peers[2])
        with pytest.raises(BlockingIOError):
            peers[2].recv(1)
        crowd.close()
        for peer in peers[:3]:
            peer.close()


def test_the_order_of_the_hang_ups_follows_the_seed():
    with listener() as server:
        orders = []
        for seed in (1, 1, 2):
            with closing(Crowd(target(server), [{"n": i} for i in range(8)])) as crowd:
                names = {c.getsockname(): i for i, c in enumerate(crowd.connections)}
                crowd.shuffle(random.Random(seed))
                orders.append([names[c.getsockname()] for c in crowd.connections])
            for _ in range(8):
                server.accept()[0].close()
        assert orders[0] == orders[1] != orders[2]
        assert orders[0] != sorted(orders[0])


def test_a_kept_connection_that_the_server_closed_is_opened_again():
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"
    with listener() as server, closing(Probe(target(server))) as probe:

        def serve():
            for _ in range(2):  # one answer for each connection
                peer = server.accept()[0]
                read_request(peer)
                peer.sendall(answer)
                peer.close()

        thread = threading.Thread(target=serve)
        thread.start()
        assert probe.load() == {}
        assert probe.load() == {}
        thread.join()
    with pytest.raises(ValueError, match="failed"):
        probe.load()


def read_request(peer):
    data = b""
    while b"}" not in data and not data.endswith(b"\r\n\r\n"):
        data += peer.recv(65536)


def ended(peer):
    while data := peer.recv(65536):
        assert data
    return True
