"""WebSocket endpoints on real servers: the one who leaves is dropped within the running step."""

from __future__ import annotations

import json
import socket
from collections import Counter
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from tests.hosts.counters import live, read_counters
from tests.hosts.server import Server, serve, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LONG = {"prompt": "a story for one who leaves", "max_tokens": 3000}
SHORT = {"prompt": "something short", "max_tokens": 5}
PATHS = ["/ws/generate", "/ws/sync", "/ws/stream", "/ws/chat", "/ws/caught"]
# (module, server, environment): each implementation reports a disconnect in its own way.
SERVERS: dict[str, tuple[str, Any, dict[str, str]]] = {
    "uvicorn websockets": ("websocket_host", "uvicorn", {"UVICORN_WS": "websockets"}),
    "uvicorn sansio": ("websocket_host", "uvicorn", {"UVICORN_WS": "websockets-sansio"}),
    "hypercorn on trio": ("websocket_host", "hypercorn-trio", {}),
    "litestar": ("litestar_host", "uvicorn", {}),
    "quart": ("quart_host", "uvicorn", {}),
}


def close(client: ClientConnection) -> None:
    client.close()


def vanish(client: ClientConnection) -> None:
    """No closing handshake: what a process that ends leaves behind."""
    client.socket.shutdown(socket.SHUT_RDWR)


LEAVE = {"close": close, "vanish": vanish}


class Running:
    """One server at a time; that nobody complained is looked at when it ends."""

    def __init__(self) -> None:
        self._name = ""
        self._server: Server | None = None
        self._stack = ExitStack()

    def server(self, name: str) -> Server:
        if self._server is None or self._name != name:
            self.end()
            module, kind, env = SERVERS[name]
            app = f"tests.hosts.apps.{module}:make"
            context = serve(app, server=kind, factory=True, env=env)
            self._name, self._server = name, self._stack.enter_context(context)
        return self._server

    def end(self) -> None:
        server, self._server = self._server, None
        try:
            if server is not None:
                server.stop_cleanly()
                for complaint in ("ERROR", "never retrieved", "Exception"):
                    assert complaint not in server.log, server.log
        finally:
            self._stack.close()


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    running = Running()
    try:
        yield running
    finally:
        running.end()


def dial(server: Server, path: str) -> ClientConnection:
    return connect(f"ws://127.0.0.1:{server.port}{path}")


def say(client: ClientConnection, message: Any) -> None:
    client.send(json.dumps(message))


def last_answer(client: ClientConnection) -> dict[str, Any]:
    """Past the parts of a stream."""
    while True:
        answer: dict[str, Any] = json.loads(client.recv())
        if "text" not in answer:
            return answer


def wait_closed(client: ClientConnection) -> None:
    """Let the server close: hypercorn on trio fails when both do so at once."""
    with pytest.raises(ConnectionClosed):
        client.recv()


def endings(server: Server) -> dict[str, int]:
    found: dict[str, int] = server.get("/stage/state").json()["endings"]
    return found


def all_cleaned_up(server: Server) -> bool:
    told = endings(server)
    return told.get("opened") == told.get("closed")


def who_leaves_is_dropped_and_who_stays_is_answered(
    server: Server, path: str, leave: str, *, another_reads: bool
) -> None:
    before, ended = read_counters(server), endings(server)
    with dial(server, path) as leaver, dial(server, "/ws/stream") as stays:
        say(leaver, LONG)
        wait_until(lambda: live(server) == 1, "it runs")
        if path == "/ws/stream":
            assert "text" in json.loads(leaver.recv())
        server.get("/stage/hold")
        held = read_counters(server)
        say(stays, SHORT)
        LEAVE[leave](leaver)
        gone = before["disconnects"] + 1
        wait_until(lambda: read_counters(server)["disconnects"] == gone, "it is noticed")
        server.get("/stage/release")
        assert last_answer(stays) == {"tokens": 5}
        wait_closed(stays)
    server.wait_idle()

    after = read_counters(server)
    assert after["aborted"] == before["aborted"] + 1
    assert after["wasted"] - before["wasted"] <= 1
    # The held step's token, which nobody got, and the five of the one who stayed.
    assert after["generated"] - held["generated"] <= 1 + 5
    wait_until(lambda: all_cleaned_up(server), "all handlers have cleaned up")
    told = Counter(endings(server)) - Counter(ended)
    how = {name: told[name] for name in told if name not in ("opened", "closed", "finished")}
    if another_reads:  # it hears of it, too, and cancels the one who waits
        assert how.keys() <= {"ClientDisconnected", "CancelledError", "Cancelled"}
    else:
        assert how == {"ClientDisconnected": 2 if path == "/ws/caught" else 1}


def who_listens_meanwhile_can_stop_a_turn_and_go_on(server: Server) -> None:
    before = read_counters(server)
    with dial(server, "/ws/chat") as client:
        say(client, LONG)
        wait_until(lambda: live(server) == 1, "it runs")
        say(client, "stop")
        assert last_answer(client) == {"stopped": True}
        say(client, SHORT)
        assert last_answer(client) == {"tokens": 5}
    server.wait_idle()
    after = read_counters(server)
    assert after["aborted"] == before["aborted"] + 1
    assert after["disconnects"] == before["disconnects"]


def who_leaves_before_the_connection_is_accepted(server: Server) -> None:
    before = read_counters(server)
    with socket.create_connection(("127.0.0.1", server.port)) as leaver:
        leaver.sendall(
            f"GET /ws/before-accepting HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\n"
            "Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
            "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n".encode()
        )
        wait_until(lambda: live(server) == 1, "it runs")
    gone = before["disconnects"] + 1
    wait_until(lambda: read_counters(server)["disconnects"] == gone, "it is noticed")
    server.wait_idle()
    assert read_counters(server)["aborted"] == before["aborted"] + 1


def a_plain_conversation(server: Server) -> None:
    before = read_counters(server)
    for path in PATHS[:4]:
        with dial(server, path) as client:
            say(client, SHORT)
            assert last_answer(client) == {"tokens": 5}
            if path != "/ws/chat":
                wait_closed(client)
    server.wait_idle()
    after = read_counters(server)
    assert after["disconnects"] == before["disconnects"]
    assert after["finished"] == before["finished"] + 4


FASTAPI: dict[str, Callable[[Server], None]] = {
    "a plain conversation": a_plain_conversation,
    "leaves before it is accepted": who_leaves_before_the_connection_is_accepted,
    "listens meanwhile": who_listens_meanwhile_can_stop_a_turn_and_go_on,
}


def stories() -> Iterator[object]:
    for name, (module, _, _) in SERVERS.items():
        fastapi = module == "websocket_host"
        told = dict(FASTAPI) if fastapi else {}
        for path in PATHS if fastapi else ["/ws/stream"]:
            for leave in LEAVE if path == "/ws/stream" else ["vanish"]:
                told[f"{leave} {path}"] = partial(
                    who_leaves_is_dropped_and_who_stays_is_answered,
                    path=path,
                    leave=leave,
                    another_reads=path == "/ws/chat" or name == "quart",
                )
        for title, story in told.items():
            yield pytest.param(name, story, id=f"{name}: {title}")


@pytest.mark.parametrize(("name", "story"), list(stories()))
def test_a_websocket(running: Running, name: str, story: Callable[[Server], None]) -> None:
    story(running.server(name))
