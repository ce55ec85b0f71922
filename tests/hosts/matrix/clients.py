"""Raw clients, so that a test decides what goes over the wire and when it ends.

Both protocols have the same methods: `request` returns a stream, of which HTTP/1.1 has only one.
"""

from __future__ import annotations

import socket
import ssl
import struct
from typing import Protocol

import h2.config
import h2.connection
import h2.events
import hyperframe.frame

from tests.hosts.server import WAIT_SECONDS

JSON = ("content-type", "application/json")


class Connection(Protocol):
    socket: socket.socket

    def request(self, path: str, body: bytes, *, of: int | None = None) -> int:
        """POST `body`; if the whole length is given by `of`, the rest of it is to come."""
        ...

    def read_until(self, marker: bytes, stream: int = 0) -> bytes:
        """What has come on the stream since the last call, up to the chunk with `marker`.

        Raises:
            AssertionError: the stream ended before; what had come is in the message.
        """
        ...

    def read_rest(self, stream: int = 0) -> bytes:
        """Everything until the server ends the stream or the connection."""
        ...


class Http1:
    def __init__(self, port: int, *, tls: ssl.SSLContext | None = None) -> None:
        self.socket = connect(port, tls)

    def request(self, path: str, body: bytes, *, of: int | None = None) -> int:
        self.socket.sendall(self.encode(path, body, of=of))
        return 0

    @staticmethod
    def encode(path: str, body: bytes, *, of: int | None = None) -> bytes:
        length = len(body) if of is None else of
        head = f"POST {path} HTTP/1.1\r\nHost: test\r\n{JSON[0]}: {JSON[1]}\r\n"
        return f"{head}Content-Length: {length}\r\n\r\n".encode() + body

    def read_until(self, marker: bytes, stream: int = 0) -> bytes:
        data = b""
        while marker not in data:
            chunk = self.socket.recv(65536)
            assert chunk, f"the connection ended without {marker!r}: {data!r}"
            data += chunk
        return data

    def read_rest(self, stream: int = 0) -> bytes:
        data = b""
        try:
            while chunk := self.socket.recv(65536):
                data += chunk
        except ConnectionResetError:
            pass
        return data


class Http2:
    def __init__(self, port: int, *, tls: ssl.SSLContext | None = None) -> None:
        self.socket = connect(port, tls)
        self._h2 = h2.connection.H2Connection(
            h2.config.H2Configuration(client_side=True, header_encoding="utf-8")
        )
        self._h2.initiate_connection()
        self._flush()
        self._data: dict[int, bytes] = {}
        self._ended: set[int] = set()
        self._closed = False

    def request(self, path: str, body: bytes, *, of: int | None = None) -> int:
        stream = self._h2.get_next_available_stream_id()
        length = len(body) if of is None else of
        headers = [
            (":method", "POST"),
            (":path", path),
            (":scheme", "http"),
            (":authority", "test"),
            JSON,
            ("content-length", str(length)),
        ]
        self._h2.send_headers(stream, headers)
        self._h2.send_data(stream, body, end_stream=of is None)
        self._flush()
        self._data[stream] = b""
        return stream

    def reset_stream(self, stream: int) -> None:
        """RST_STREAM with CANCEL, as a browser does for a closed tab or an aborted fetch."""
        self._h2.reset_stream(stream, error_code=8)
        self._flush()

    def go_away(self) -> None:
        # Not by way of `h2`, which would not read on afterwards, as a client may.
        frame = hyperframe.frame.GoAwayFrame(0, last_stream_id=0, error_code=0)
        self.socket.sendall(frame.serialize())

    def read_until(self, marker: bytes, stream: int = 0) -> bytes:
        while marker not in self._data[stream]:
            ended = stream in self._ended or self._closed
            assert not ended, f"the stream ended without {marker!r}: {self._data[stream]!r}"
            self._pump()
        data, self._data[stream] = self._data[stream], b""
        return data

    def read_rest(self, stream: int = 0) -> bytes:
        while stream not in self._ended and not self._closed:
            self._pump()
        data, self._data[stream] = self._data[stream], b""
        return data

    def _pump(self) -> None:
        try:
            received = self.socket.recv(65536)
        except (ConnectionResetError, ssl.SSLEOFError):
            received = b""
        if not received:
            self._closed = True
            return
        for event in self._h2.receive_data(received):
            if isinstance(event, h2.events.DataReceived):
                self._data[event.stream_id] += event.data
                self._h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            elif isinstance(event, h2.events.StreamEnded | h2.events.StreamReset):
                self._ended.add(event.stream_id)
            elif isinstance(event, h2.events.ConnectionTerminated):
                self._closed = True
        self._flush()

    def _flush(self) -> None:
        if data := self._h2.data_to_send():
            self.socket.sendall(data)


def connect(port: int, tls: ssl.SSLContext | None) -> socket.socket:
    plain = socket.create_connection(("127.0.0.1", port), timeout=WAIT_SECONDS)
    # Else a small frame behind another one waits 40 ms for the kernel's acknowledgement.
    plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return plain if tls is None else tls.wrap_socket(plain, server_hostname="localhost")


def fin(connection: Connection) -> None:
    """Hang up as a client that ends: the kernel sends a FIN."""
    # With TLS too: no close_notify, which a killed process does not send either.
    connection.socket.close()


def rst(connection: Connection) -> None:
    """Hang up as a client that crashed, or closed with unread data: the kernel sends an RST."""
    connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.socket.close()


def half_close(connection: Connection) -> None:
    """Say that nothing more will be sent, and go on reading."""
    # Of the plain socket: TLS has no half-closed state.
    socket.socket.shutdown(connection.socket, socket.SHUT_WR)
