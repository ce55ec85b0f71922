"""Many clients in one thread: they send a request each, read what comes, and hang up when told."""

from __future__ import annotations

import selectors
import time
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    import random
    import socket
    from collections.abc import Iterable, Sequence

    from qwen3_asgi.bench.wire import Target

READ_BYTES = 1 << 18


class Crowd:
    """The connections of one storm, or of one load. Use it in one thread, and close it.

    The first of `connections` is the next to hang up. `answered` counts those whose server closed
    the connection before they hung up, so that their answer was complete (or refused).
    """

    def __init__(self, target: Target, bodies: Iterable[dict[str, Any]]) -> None:
        self.answered = 0
        self.bytes_read = 0
        self.stopped = False
        self._stop: TextIO | None = None
        self._selector = selectors.DefaultSelector()
        self.connections: list[socket.socket] = []
        try:
            for body in bodies:
                self.add(target, body)
        except BaseException:
            self.close()
            raise

    def __len__(self) -> int:
        return len(self.connections)

    def add(self, target: Target, body: dict[str, Any]) -> None:
        """One more client with a completion request."""
        connection = target.send("POST", "/v1/completions", body)
        connection.setblocking(False)
        self._selector.register(connection, selectors.EVENT_READ)
        self.connections.append(connection)

    def stop_at(self, pipe: TextIO) -> None:
        """`stopped` becomes true when this pipe has something to say, such as its end."""
        self._selector.register(pipe, selectors.EVENT_READ)
        self._stop = pipe

    def read(self, seconds: float) -> None:
        """Read what has come, and wait for more for this long if nothing has."""
        for key, _ in self._selector.select(max(0.0, seconds)):
            if key.fileobj is self._stop:
                self.stopped = True
                continue
            connection: Any = key.fileobj
            try:
                data = connection.recv(READ_BYTES)
            except BlockingIOError:
                continue
            except OSError:
                data = b""
            self.bytes_read += len(data)
            if not data:
                self.answered += 1
                self._leave(connection)

    def read_until(self, moment: float) -> None:
        """Go on reading until this moment of `time.perf_counter`."""
        while (left := moment - time.perf_counter()) > 0:
            self.read(left)

    def shuffle(self, rng: random.Random) -> None:
        """Who hangs up first has nothing to do with who came first."""
        rng.shuffle(self.connections)

    def hang_up_at(self, moments: Sequence[float]) -> None:
        """One client after the other hangs up at these (ascending) moments of `perf_counter`; as
        many stay as there are fewer moments than clients."""
        for moment in moments:
            self.read_until(moment)
            if self.connections:
                self._leave(self.connections[0])

    def close(self) -> None:
        """Everybody who is left hangs up, now."""
        while self.connections:
            self._leave(self.connections[-1])
        self._selector.close()

    def _leave(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        self.connections.remove(connection)
        connection.close()
