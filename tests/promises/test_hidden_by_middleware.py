"""1,000 clients leave a real server behind a no-op `@app.middleware("http")`, and not one runs on.

That middleware puts a `receive` of its own in front of everything below it, and hides from most
apps that a client has gone.
"""

from __future__ import annotations

from contextlib import ExitStack
from itertools import cycle, islice
from typing import TYPE_CHECKING, Any

import pytest

from tests.hosts.apps.stage import MAX_BATCH, MAX_PREFILL_TOKENS
from tests.hosts.server import Server, read_until, serve, wait_until

if TYPE_CHECKING:
    import socket

ABANDONED = 1000
AT_ONCE = 100
# At the stage's pace half a minute: who finishes before the steps are held has not run on.
MAX_TOKENS = 3000
ONE_STEP_TOKENS = MAX_BATCH + MAX_PREFILL_TOKENS

MOUNTED = ("streams from the mount", "waits for the mount")
# Few in threads: a server has only forty, and the others would wait for one and not be live.
OWN = ("/stream", "/generate", "/stream", "/generate", "/sync")


def ask(server: Server, kind: str, client: int) -> socket.socket:
    body: dict[str, Any] = {"prompt": f"client {client}", "max_tokens": MAX_TOKENS}
    if kind in OWN:
        return server.send("POST", kind, body)
    body |= {"model": "fake", "stream": kind.startswith("streams")}
    return server.send("POST", f"{server.mount}/v1/completions", body)


def live(server: Server) -> int:
    load = server.load()
    return int(load["num_running"] + load["num_waiting"])


def endings(server: Server) -> dict[str, int]:
    """How the handlers of the host's own endpoints have ended."""
    told: dict[str, int] = server.get("/stage/state").json()["endings"]
    return told


def ran_through(server: Server) -> float:
    """Generations that came to their own end."""
    reasons = ("length", "stop")
    return sum(
        server.metric("vllm:request_success_total", finished_reason=reason) for reason in reasons
    )


def wait_noticed(server: Server, hang_ups: int) -> None:
    counter = "qwen3_asgi_client_disconnects_total"
    wait_until(lambda: server.metric(counter) == hang_ups, "every hang-up is noticed")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("app", "kinds"),
    [
        pytest.param("fastapi_host:make", MOUNTED + OWN, id="DisconnectMiddleware is outermost"),
        pytest.param("starlette_host:make_unwatched", MOUNTED, id="the mounted app alone"),
    ],
)
def test_none_of_a_thousand_runs_on(app: str, kinds: tuple[str, ...]) -> None:
    with serve(f"tests.hosts.apps.{app}", factory=True) as server:
        gone = 0
        while gone < ABANDONED:
            with ExitStack() as clients:
                for client, kind in enumerate(islice(cycle(kinds), AT_ONCE), start=gone):
                    connection = clients.enter_context(ask(server, kind, client))
                    if client == gone:  # one at least is in the middle of its answer
                        read_until(connection, b"data: ")
                wait_until(lambda: live(server) == AT_ONCE, f"{AT_ONCE} live requests")
                held = server.get("/stage/hold").json()["steps"]
                assert server.load()["num_running"] > 0
            gone += AT_ONCE
            wait_noticed(server, gone)
            server.get("/stage/release")
            server.wait_idle()
            state = server.get("/stage/state").json()
            assert state["steps"] == held, "a step began for clients that were gone"
        own = sum(kind in OWN for kind in islice(cycle(kinds), AT_ONCE)) * (ABANDONED // AT_ONCE)
        wait_until(lambda: sum(endings(server).values()) == own, "every handler has ended")
        assert "finished" not in endings(server)
        assert ran_through(server) == 0
        assert server.metric("qwen3_asgi_requests_cancelled_total") == ABANDONED
        wasted = server.metric("qwen3_asgi_wasted_tokens_total")
        assert wasted <= ONE_STEP_TOKENS * ABANDONED // AT_ONCE
        server.stop_cleanly()


def test_under_no_watch_at_all_everybody_runs_on() -> None:
    """What the other test would count if nothing watched: the same host without our middleware."""
    clients = MAX_BATCH
    with serve("tests.hosts.apps.starlette_host:make_unwatched", factory=True) as server:
        with ExitStack() as connections:
            for client, path in enumerate(islice(cycle(("/generate", "/sync")), clients)):
                body = {"prompt": f"client {client}", "max_tokens": 300}
                connections.enter_context(server.send("POST", path, body))
            wait_until(lambda: live(server) == clients, "everybody's request is live")
            held = server.get("/stage/hold").json()["steps"]
        server.get("/stage/release")
        wait_until(lambda: endings(server) == {"finished": clients}, "everybody is served")
        assert ran_through(server) == clients
        assert server.get("/stage/state").json()["steps"] > held
        assert server.metric("qwen3_asgi_client_disconnects_total") == 0
