"""`Expect: 100-continue` on real servers: who waits for it is told as without the middleware."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import pytest

from tests.hosts.server import WAIT_SECONDS, Server, read_until, serve

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.hosts.server import ServerKind

BODY = b"hello"
# What a server says before the app has read anything, and whatever the app does then.
AT_ONCE = ("hypercorn-asyncio", "hypercorn-trio")


@pytest.fixture(scope="module", params=["uvicorn", "uvicorn-h11", "granian", *AT_ONCE])
def server(request: pytest.FixtureRequest) -> Iterator[tuple[ServerKind, Server]]:
    kind: ServerKind = request.param
    with serve("tests.hosts.apps.upload_host:make", server=kind, factory=True) as running:
        yield kind, running


def statuses(server: Server, path: str, *, send_body: bool) -> list[int]:
    """Of all that the server answers to somebody who sends the body only when told to."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=WAIT_SECONDS) as connection:
        connection.sendall(
            f"POST {path} HTTP/1.1\r\nHost: test\r\nConnection: close\r\n"
            f"Expect: 100-continue\r\nContent-Length: {len(BODY)}\r\n\r\n".encode()
        )
        data = read_until(connection, b"\r\n\r\n")
        if send_body:
            connection.sendall(BODY)
        while chunk := connection.recv(65536):
            data += chunk
    lines = [line for line in data.split(b"\r\n") if line.startswith(b"HTTP/1.1 ")]
    return [int(line.split()[1]) for line in lines]


@pytest.mark.parametrize("way", ["bare", "watched"])
def test_it_is_said_when_the_app_reads_and_not_before(
    server: tuple[ServerKind, Server], way: str
) -> None:
    kind, running = server
    assert statuses(running, f"/{way}/discard", send_body=True) == [100, 200]
    refused = [100, 417] if kind in AT_ONCE else [417]
    assert statuses(running, f"/{way}/refuse", send_body=False) == refused


def test_a_generation_before_the_body_asks_for_it(server: tuple[ServerKind, Server]) -> None:
    """Only by reading on can be seen whether the client is still there, and that asks for more."""
    _, running = server
    assert statuses(running, "/watched/refuse?generating", send_body=False) == [100, 417]
    assert statuses(running, "/watched/discard?generating", send_body=True) == [100, 200]
