"""Ctrl-C on a server with live streams: an end within the drain limit, and without a traceback."""

from __future__ import annotations

import time

import pytest

from qwen3_asgi import Engine, EngineConfig, SamplingParams
from tests.serving import serve

STREAM = {
    "model": "tiny",
    "prompt": "1, 2, 3,",
    "max_tokens": 3000,
    "temperature": 0,
    "ignore_eos": True,
    "stream": True,
}


@pytest.mark.slow
def test_ctrl_c_ends_live_streams_within_the_drain_limit():
    with serve("tiny", "--drain", "1") as server:
        sockets = [server.send("/v1/completions", STREAM) for _ in range(4)]
        server.wait_for(lambda load: load["num_running"] == 4, "running")
        begin = time.monotonic()
        status = server.interrupt()
        # Generous: the limit is the drain, and what a loaded machine takes to leave.
        assert time.monotonic() - begin < 20
        for connection in sockets:
            data = b"".join(iter(lambda: connection.recv(65536), b""))  # noqa: B023
            assert b"data: " in data
            connection.close()
    assert status == 0
    assert "Traceback" not in server.output
    assert "Finished server process" in server.output


def test_a_second_engine_starts_in_the_process_where_one_was_stopped():
    config = EngineConfig(num_kv_blocks=64, num_threads=1)
    texts = []
    for _ in range(2):
        with Engine("tiny", config) as engine:
            params = SamplingParams(max_tokens=5, temperature=0)
            texts.append(engine.generate_sync(prompt="1, 2, 3,", params=params).text)
        assert engine.state == "stopped"
    assert texts[0] == texts[1]
