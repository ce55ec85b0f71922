"""Ctrl-C on a server with live streams: an end within the drain limit, and without a traceback."""

from __future__ import annotations

import time

from qwen3_asgi import Engine, EngineConfig, SamplingParams
from tests.hosts.server import read_until, serve_model, wait_until

STREAM = {
    "model": "tiny",
    "prompt": "1, 2, 3,",
    "max_tokens": 3000,
    "temperature": 0,
    "ignore_eos": True,
    "stream": True,
}


def test_ctrl_c_ends_live_streams_within_the_drain_limit():
    with serve_model("tiny", "--drain", "1") as server:
        sockets = [server.send("POST", "/v1/completions", STREAM) for _ in range(4)]
        wait_until(lambda: server.load()["num_running"] == 4, "four streams run")
        begin = time.monotonic()
        server.stop_cleanly()
        # Generous: the limit is the drain, and what a loaded machine takes to leave.
        assert time.monotonic() - begin < 20
        for connection in sockets:
            # Each stream was ended by the engine, with an error frame; none was torn off.
            assert b"was stopped" in read_until(connection, b'"error"')
            connection.close()
        assert server.process.returncode == 0
        assert "Finished server process" in server.log


def test_a_second_engine_starts_in_the_process_where_one_was_stopped():
    config = EngineConfig(num_kv_blocks=64, num_threads=1)
    texts = []
    for _ in range(2):
        with Engine("tiny", config) as engine:
            params = SamplingParams(max_tokens=5, temperature=0)
            texts.append(engine.generate_sync(prompt="1, 2, 3,", params=params).text)
        assert engine.state == "stopped"
    assert texts[0] == texts[1]
