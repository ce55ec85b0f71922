"""Five hundred clients hang up at random moments: 0/0 two iterations after the last, no leak."""

from __future__ import annotations

import random

import pytest

from qwen3_asgi.engine.engine import OFFLOAD_THREADS
from tests.hosts.server import serve, wait_until

CLIENTS = 500
SEED = 20_000
# The hang-ups are spread over this many steps of the engine.
STEPS = 40
# Two of each four stream; two of each four are the host's own endpoints.
PATHS = ["/llm/v1/completions", "/llm/v1/completions", "/generate", "/stream"]
# asyncio's objects of the request that asks, and what caches fill up with; a leak of anything that
# a client owns would be a hundred and more.
FEW = 50
# The last two: Starlette's own streaming response may hear of the end first, and cancels its body.
ENDINGS = {"ClientDisconnected", "CancelledError", "GeneratorExit"}
# What grows up to a bound of its own: the prefix cache; and the fake model records every row.
WORKER = "AnyIO worker thread"
KEPT = ("qwen3_asgi.scheduler.blocks.CachedBlock", "qwen3_asgi.testing.")


@pytest.mark.parametrize("kind", ["uvicorn", "hypercorn-asyncio"])
def test_five_hundred_clients_leave_nothing_behind(kind):
    with serve("tests.hosts.apps.storm_host:make", server=kind, factory=True) as server:
        answer = ask(server)
        storm(server, clients=40)  # starts what is started once, such as worker threads
        before = server.get("/census/everything").json()

        storm(server, CLIENTS)

        assert server.metric("vllm:num_requests_running") == 0
        assert server.metric("vllm:num_requests_waiting") == 0
        assert server.metric("vllm:kv_cache_usage_perc") == 0
        after = {}

        def nothing_is_left():
            after.update(server.get("/census/everything").json())
            return all(after[name] <= before[name] for name in ("tasks", "descriptors"))

        wait_until(nothing_is_left, f"no more tasks and descriptors than before: {before}")
        workers = after["threads"].pop(WORKER, 0)
        before["threads"].pop(WORKER, 0)
        assert after["threads"] == before["threads"]
        assert workers <= OFFLOAD_THREADS + 1, "the engine's own, and the one that holds steps"
        grown = {
            name: count - before["objects"].get(name, 0)
            for name, count in after["objects"].items()
            if count - before["objects"].get(name, 0) > FEW and not name.startswith(KEPT)
        }
        assert grown == {}
        assert ask(server) == answer
        server.wait_idle()


def storm(server, clients):
    rng = random.Random(SEED + clients)
    entered = server.get("/census/requests").json()["entered"]
    endings = server.get("/stage/state").json()["endings"]
    connections = [send(server, index) for index in range(clients)]
    rng.shuffle(connections)
    *leaving, last = connections
    hasty = clients // 10  # these are gone before the server has looked at most of them
    for connection in leaving[:hasty]:
        connection.close()

    def all_are_in():
        load = server.load()
        return load["num_running"] + load["num_waiting"] >= clients - hasty

    wait_until(all_are_in, "the requests of all who stay are live")
    step = server.get("/stage/state").json()["steps"]
    moments = sorted(step + rng.uniform(0, STEPS) for _ in leaving[hasty:])
    for moment, connection in zip(moments, leaving[hasty:], strict=True):
        if step < moment:
            step = reach_step(server, moment)
        connection.close()

    held = server.get("/stage/hold").json()
    last.close()

    def all_are_noticed():
        requests = server.get("/census/requests").json()
        return requests["entered"] - entered == clients and requests["live"] == 0

    wait_until(all_are_noticed, "every client's request was begun, and ended by its hang-up")
    before = server.load()
    assert before["num_running"], "the last client was not running, so nothing is shown"
    server.get("/stage/release")
    after = server.wait_idle()
    assert after["iteration"] - before["iteration"] <= 2
    state = server.get("/stage/state").json()
    assert state["steps"] == held["steps"], "a forward pass was begun for nobody"
    ended = {
        name: state["endings"].get(name, 0) - endings.get(name, 0) for name in state["endings"]
    }
    assert {name for name, count in ended.items() if count} <= ENDINGS
    assert sum(ended.values()) <= clients // 2


def reach_step(server, moment):
    """The first step seen that is not before this moment."""
    steps = [0]

    def reached():
        steps.append(server.get("/stage/state").json()["steps"])
        return steps[-1] >= moment

    wait_until(reached, f"step {moment:.0f} has begun")
    return steps[-1]


def send(server, index):
    path = PATHS[index % len(PATHS)]
    body = {
        "model": "fake",
        "prompt": " ".join(f"c{index}w{word % 89}" for word in range(5 + index % 20)),
        "max_tokens": 2000,
        "ignore_eos": True,
    }
    return server.send("POST", path, body | {"stream": True} if index % 4 == 0 else body)


def ask(server):
    body = {"model": "fake", "prompt": "one two three", "max_tokens": 8, "ignore_eos": True}
    reply = server.post("/llm/v1/completions", body).json()
    assert reply["usage"]["completion_tokens"] == 8
    return reply["choices"][0]["text"]
