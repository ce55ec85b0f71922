"""How other threads talk to the scheduler: a command queue that wakes it, and the cancel inbox.

Both are lock-free for the caller. `queue.SimpleQueue` is used because its `put` is re-entrant: a
cancel may come from a finalizer that the garbage collector runs in the middle of another `put`,
where an ordinary lock would deadlock.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, NamedTuple

from qwen3_asgi.scheduler.control import Control

if TYPE_CHECKING:
    from qwen3_asgi.scheduler.plan import RequestId
    from qwen3_asgi.scheduler.request import Request


@dataclass(frozen=True, slots=True)
class Submit:
    """New requests, which arrive together: one, or one and its forks."""

    requests: tuple[Request, ...]


@dataclass(frozen=True, slots=True)
class Wake:
    """Nothing but a reason to look again."""


@dataclass(frozen=True, slots=True)
class Stop:
    """End the loop after this iteration; whatever is live ends with "abort"."""


@dataclass(frozen=True, slots=True)
class ClearPrefixCache:
    """Forget every prefix that no live request holds."""


Command = Submit | Control | Wake | Stop | ClearPrefixCache


class Cancelled(NamedTuple):
    """An entry of the cancel inbox: the id, and what had been forwarded for it by then.

    With an `error` it is not its owner who gave it up: it is too late.
    """

    request_id: RequestId
    forwarded_tokens: int
    error: Exception | None = None


class Inbox:
    """Written by any thread, read by the scheduler thread."""

    def __init__(self) -> None:
        self._commands: SimpleQueue[Command] = SimpleQueue()
        self._cancelled: deque[Cancelled] = deque()

    def put(self, command: Command) -> None:
        self._commands.put(command)

    def cancel(self, entry: Cancelled) -> None:
        # The entry first, the wake-up second: whoever is woken must find it.
        self._cancelled.append(entry)
        self._commands.put(_WAKE)

    def take_commands(self) -> list[Command]:
        """Everything that has arrived, without waiting."""
        commands: list[Command] = []
        try:
            while True:
                commands.append(self._commands.get_nowait())
        except Empty:
            return commands

    def wait_command(self, seconds: float | None = None) -> Command:
        """Park until a command arrives, or until so many seconds have passed."""
        try:
            return self._commands.get(timeout=seconds)
        except Empty:
            return _WAKE

    def wake(self) -> None:
        """Something other than a command is to be looked at."""
        self._commands.put(_WAKE)

    def take_cancelled(self) -> list[Cancelled]:
        """The cancels that have arrived, each exactly once."""
        return [self._cancelled.popleft() for _ in range(len(self._cancelled))]


_WAKE = Wake()
