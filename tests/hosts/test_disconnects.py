"""Clients of real servers hang up all at once, whatever stands between them and the engine.

A step is held while they leave, until the server has noticed all of them: from then on not one
forward pass may begin.
"""

from __future__ import annotations

import socket
import struct
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

from tests.hosts.apps.stage import MAX_BATCH, MAX_PREFILL_TOKENS
from tests.hosts.counters import live, read_counters
from tests.hosts.server import Server, read_until, serve, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

CLIENTS = 8
# At the stage's pace half a minute: nobody may finish before the step is held, however slow we are.
MAX_TOKENS = 3000
# Anybody's bound on one forward pass: a token for each running request and a prefill budget.
ONE_STEP_TOKENS = MAX_BATCH + MAX_PREFILL_TOKENS

OWN = ("/generate", "/sync", "/stream")
# (module:factory, server, mount, the host's own endpoints)
HOSTS: dict[str, tuple[str, Any, str, tuple[str, ...]]] = {
    "starlette": ("starlette_host:make", "uvicorn", "/llm", OWN),
    "starlette h11, no middleware of ours": (
        "starlette_host:make_unwatched",
        "uvicorn-h11",
        "/llm",
        (),
    ),
    "starlette on trio": ("starlette_host:make", "hypercorn-trio", "/llm", OWN),
    "two mounts deep": ("nested_host:make", "uvicorn", "/tools/llm", ()),
    "fastapi": ("fastapi_host:make", "uvicorn", "/llm", OWN),
    "django": ("django_host:make", "uvicorn", "/llm", OWN),
    # Without "/sync": these have too few threads on a small machine for all clients at once.
    "litestar": ("litestar_host:make", "uvicorn", "/llm", ("/generate", "/stream")),
    "quart": ("quart_host:make", "uvicorn", "/llm", ("/generate", "/stream")),
    "plain": ("plain_host:make", "uvicorn", "/llm", OWN),
}
# How a client leaves is the server's affair, so once for each kind of server is enough.
WAYS = ("starlette", "starlette h11, no middleware of ours", "starlette on trio")
# "mounted" is `create_app`'s app; "log" comes last and ends the server.
CASES = [
    pytest.param(host, path, id=f"{host}: {path}")
    for host, (_, _, _, own) in HOSTS.items()
    for path in ("mounted", *own, *(["ways"] if host in WAYS else []), "log")
]


class Running:
    """One host's server at a time, started when its first test asks for it."""

    def __init__(self) -> None:
        self._name = ""
        self._server: Server | None = None
        self._stack = ExitStack()

    def server(self, host: str) -> Server:
        if self._server is None or self._name != host:
            self.close()
            app, kind, mount, _ = HOSTS[host]
            if kind.startswith("hypercorn"):
                pytest.importorskip("hypercorn")
            path = f"tests.hosts.apps.{app}"
            context = serve(path, server=kind, factory=True, mount=mount)
            self._name, self._server = host, self._stack.enter_context(context)
        return self._server

    def close(self) -> None:
        self._server = None
        self._stack.close()


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    running = Running()
    yield running
    running.close()


def long_prompt(client: int) -> str:
    """Several prefill steps long, and no prefix of another client's."""
    return f"{client} " + " ".join(f"word {client} {i}" for i in range(100))


def start(server: Server, path: str, client: int) -> tuple[socket.socket, bool]:
    """A client's request, and whether its answer is a stream that can be read as it is."""
    body: dict[str, Any] = {"prompt": long_prompt(client), "max_tokens": MAX_TOKENS}
    even = client % 2 == 0
    encoding = "identity" if even else "gzip"
    if path != "mounted":
        streams = even and path == "/stream"
        return server.send("POST", path, body, encoding=encoding), streams
    body |= {"model": "fake", "stream": even}
    route = f"{server.mount}/v1/completions"
    return server.send("POST", route, body, encoding=encoding), even


@pytest.mark.parametrize(("host", "path"), CASES)
def test_a_gone_client_leaves_nothing_behind(running: Running, host: str, path: str) -> None:
    server = running.server(host)
    try:
        if path == "log":  # a client that leaves is no error
            server.stop_cleanly()
        elif path == "ways":
            leave_in_every_way(server)
        else:
            storm(server, path)
    except BaseException:
        running.close()  # the next test shall not find this one's leftovers
        raise


def storm(server: Server, path: str) -> None:
    before = read_counters(server)
    with ExitStack() as clients:
        for client in range(CLIENTS):
            connection, streams = start(server, path, client)
            clients.enter_context(connection)
            if streams and client == 0:
                # One at least is in the middle of its answer. Before the others start: the engine
                # need not get requests in the order they were sent, and does not run all at once.
                read_until(connection, b"data: ")
        wait_until(lambda: live(server) == CLIENTS, f"{CLIENTS} live requests")
        held = server.get("/stage/hold").json()["steps"]
        busy = server.load()
        assert live(server) == CLIENTS
        assert busy["num_running"] > 0
        assert busy["kv_used_blocks"] > 0
        assert server.metric("vllm:kv_cache_usage_perc") > 0
    # They have all hung up now.
    gone = before["disconnects"] + CLIENTS
    wait_until(lambda: read_counters(server)["disconnects"] == gone, "every hang-up is noticed")
    server.get("/stage/release")
    server.wait_idle()

    assert server.get("/stage/state").json()["steps"] == held, "a step began for gone clients"
    after = read_counters(server)
    assert after["cancelled"] == before["cancelled"] + CLIENTS
    assert after["aborted"] == before["aborted"] + CLIENTS
    assert after["wasted"] - before["wasted"] <= ONE_STEP_TOKENS
    assert after["generated"] - before["generated"] < CLIENTS * MAX_TOKENS / 4
    for gauge in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert server.metric(f"vllm:{gauge}") == 0, gauge
    if path != "mounted":  # the host's own handlers were told, so that they could clean up
        told = before["unfinished"] + CLIENTS
        wait_until(lambda: read_counters(server)["unfinished"] == told, "handlers have ended")
        assert read_counters(server)["finished"] == before["finished"]

    follow_up = {"prompt": "again", "max_tokens": 3}
    if path == "mounted":
        answer = server.post(f"{server.mount}/v1/completions", {**follow_up, "model": "fake"})
        assert answer.json()["usage"]["completion_tokens"] == 3
    else:
        answer = server.post(path, follow_up)
    assert answer.status_code == 200
    server.wait_idle()


def leave_in_every_way(server: Server) -> None:
    """One client each; the storms only close."""
    body = {"model": "fake", "prompt": "x", "max_tokens": MAX_TOKENS}
    route = f"{server.mount}/v1/completions"
    for leave in (socket.socket.close, reset, lambda it: it.shutdown(socket.SHUT_WR)):
        before = read_counters(server)
        with server.send("POST", route, body) as connection:
            wait_until(lambda: live(server) == 1, "it runs")
            leave(connection)
            server.wait_idle()
        after = read_counters(server)
        assert after["disconnects"] == before["disconnects"] + 1
        assert after["aborted"] == before["aborted"] + 1

    # In the middle of its upload: nothing was started, so nothing is counted.
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        head = f"POST {route} HTTP/1.1\r\nHost: test\r\nContent-Length: 1000\r\n\r\n"
        connection.sendall(head.encode() + b'{"model": "fake", ')
    assert server.post(route, {**body, "max_tokens": 2}).status_code == 200
    assert read_counters(server)["aborted"] == after["aborted"]


def reset(connection: socket.socket) -> None:
    """Close with an RST instead of a FIN, as a crashed client's system does."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()
