"""What a server does, with nothing of ours: a raw ASGI app and a raw client.

    python -m tests.hosts.matrix.reproduce pipelining granian
    python -m tests.hosts.matrix.reproduce half_close "hypercorn trio" --http2

prints what the app and the client have seen. Each example returns whether the limit shows.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from tests.hosts.matrix.clients import Http1, Http2, fin, half_close
from tests.hosts.matrix.host import COLUMNS, Host, Hosts
from tests.hosts.server import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.types import Receive, Scope, Send

FIRST, REST = b"the first half, ", b"the rest"

# The app's side: what has happened, as "/path called", "/path told", "/path finished".
events: list[str] = []


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers half, waits for the disconnect, and answers the rest."""
    if scope["type"] != "http":
        raise RuntimeError("http only")
    path = scope["path"]
    if path == "/events":
        await answer(send, json.dumps(events).encode(), whole=True)
        return
    events.append(f"{path} called")
    while (await receive()).get("more_body", False):
        pass
    await answer(send, FIRST, whole=False)
    while (await receive())["type"] != "http.disconnect":
        pass
    events.append(f"{path} told")
    await send({"type": "http.response.body", "body": REST})
    events.append(f"{path} finished")


async def answer(send: Send, body: bytes, *, whole: bool) -> None:
    length = len(body) if whole else len(FIRST) + len(REST)
    headers = [(b"content-length", str(length).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": not whole})


def make() -> Callable[..., object]:
    return app


def seen(host: Host) -> list[str]:
    found: list[str] = host.server.get("/events").json()
    return found


def soon(host: Host, event: str) -> bool:
    return host.glance(lambda: event in seen(host))


def pipelining(host: Host, path: str) -> bool:
    """Two requests in one segment; the client reads half of the first answer and leaves."""
    connection = host.connect()
    connection.socket.sendall(Http1.encode(path, b"{}") + Http1.encode(f"{path}/second", b"{}"))
    connection.read_until(FIRST)
    fin(connection)
    return not soon(host, f"{path} told")


def body(host: Host, path: str) -> bool:
    """Half a body. Is the app called?"""
    connection = host.connect()
    connection.request(path, b"half of it", of=1000)
    return not soon(host, f"{path} called")


def half_closing(host: Host, path: str) -> bool:
    """The client closes its sending half and reads on. Does the rest arrive?"""
    connection = host.connect()
    asked = connection.request(path, b"{}")
    connection.read_until(FIRST, asked)
    half_close(connection)
    wait_until(lambda: f"{path} told" in seen(host), "the app is told")
    if not soon(host, f"{path} finished"):
        return True  # and the connection stays open
    return REST not in connection.read_rest(asked)


def goaway(host: Host, path: str) -> bool:
    """The client says that it opens no more streams, and reads on. Does the server close?"""
    connection = host.connect()
    assert isinstance(connection, Http2)
    connection.read_until(FIRST, connection.request(path, b"{}"))
    connection.go_away()
    return soon(host, f"{path} told")


HTTP1_ONLY, HTTP2_ONLY = {"pipelining"}, {"goaway"}
EXAMPLES: dict[str, Callable[[Host, str], bool]] = {
    "pipelining": pipelining,
    "body": body,
    "half_close": half_closing,
    "goaway": goaway,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("example", choices=EXAMPLES)
    parser.add_argument("server", choices=[column.name for column in COLUMNS])
    parser.add_argument("--http2", action="store_true")
    options = parser.parse_args()
    column = next(column for column in COLUMNS if column.name == options.server)
    with tempfile.TemporaryDirectory() as folder:
        hosts = raw_hosts(Path(folder))
        try:
            host = hosts.host(column, http2=options.http2)
            shows = EXAMPLES[options.example](host, "/it")
            print(f"the app: {seen(host)}")  # noqa: T201
            print(f"the limit shows: {shows}")  # noqa: T201
            host.close_connections()
        finally:
            hosts.close()


def raw_hosts(folder: Path) -> Hosts:
    return Hosts(folder, "tests.hosts.matrix.reproduce")


if __name__ == "__main__":
    main()
