"""All clients of a real server hang up at once: 0/0, the KV cache back, hardly a token wasted."""

from __future__ import annotations

import pytest

from qwen3_asgi.config import EngineConfig
from tests.hosts.server import wait_until

MODEL = "tiny"


def completion(client, words, *, stream):
    return {
        "model": MODEL,
        "prompt": " ".join(f"c{client}w{word % 89}" for word in range(words)),
        "max_tokens": 400,
        "temperature": 0,
        "ignore_eos": True,
        "stream": stream,
    }


@pytest.mark.parametrize("clients", [8, 64])
@pytest.mark.parametrize("stream", [True, False], ids=["streaming", "plain"])
def test_a_storm_ends_in_zero_zero(tiny_server, clients, stream):
    before = tiny_server.wait_idle()
    wasted = tiny_server.metric("qwen3_asgi_wasted_tokens_total")
    cancelled = tiny_server.metric("qwen3_asgi_requests_cancelled_total")
    sockets = [
        tiny_server.send("POST", "/v1/completions", completion(client, 250, stream=stream))
        for client in range(clients)
    ]
    busy = {}

    def all_are_in():
        busy.update(tiny_server.load())
        return busy["num_running"] and busy["num_running"] + busy["num_waiting"] == clients

    wait_until(all_are_in, "every client's request is live")
    for connection in sockets:
        connection.close()
    idle = tiny_server.wait_idle()

    assert idle["kv_used_blocks"] == before["kv_used_blocks"] == 0
    assert tiny_server.metric("vllm:num_requests_running") == 0
    assert tiny_server.metric("vllm:num_requests_waiting") == 0
    assert tiny_server.metric("vllm:kv_cache_usage_perc") == 0
    assert tiny_server.metric("qwen3_asgi_requests_cancelled_total") == cancelled + clients
    # One step in flight per cancel: at most its prefill chunk and one token for each that decodes.
    # The sockets close one after the other, so that a few steps may pass between first and last.
    limits = EngineConfig()
    steps = idle["step"] - busy["step"]
    one_step = limits.max_prefill_tokens + limits.max_batch
    assert tiny_server.metric("qwen3_asgi_wasted_tokens_total") - wasted <= one_step * max(1, steps)
    answer = tiny_server.post(
        "/v1/completions", {"model": MODEL, "prompt": "1, 2, 3,", "max_tokens": 4}
    ).json()
    assert answer["usage"]["completion_tokens"] >= 1
