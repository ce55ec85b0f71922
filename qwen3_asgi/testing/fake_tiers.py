"""Host memory and a file for KV blocks, whose copies run and land only when a test says so.

The copies are run as late as the contract allows, so a block that is given away too early, or a
slot that is found too early, shows as wrong content.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING

from qwen3_asgi.scheduler.executor import Copy, LandedCopies, Place

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from qwen3_asgi.scheduler.blocks import CachedBlock


class FakeTiers:
    """Implements `KVTiers`. What a block holds is whatever `read` returns and `write` takes.

    With `by_hand`, nothing lands before `land`; otherwise everything has landed when it is asked
    for. A source or target in `broken` fails its copy.
    """

    def __init__(self, *, host_slots: int = 0, file_slots: int = 0, by_hand: bool = False) -> None:
        self.host_slots = host_slots
        self.file_slots = file_slots
        self.by_hand = by_hand
        self.broken: set[Place] = set()
        self.copied: list[Copy] = []
        # Set by the executor: what a device block holds.
        self.read: Callable[[int], object] = _unset
        self.write: Callable[[int, object], None] = _unset
        self.wake: Callable[[], None] = lambda: None
        self._held: dict[Place, object] = {}
        self._restored: dict[int, CachedBlock] = {}
        self._waiting: deque[tuple[int, Sequence[Copy]]] = deque()
        self._run: deque[LandedCopies] = deque()
        self._landed: list[LandedCopies] = []
        self._tickets = 0
        # With overlap, steps run the copies before them on a thread of their own.
        self._lock = threading.RLock()

    def restored(self) -> Mapping[int, CachedBlock]:
        return self._restored

    def begin(self, copies: Sequence[Copy]) -> int:
        with self._lock:
            self._tickets += 1
            self._waiting.append((self._tickets, tuple(copies)))
            return self._tickets

    def landed(self) -> Sequence[LandedCopies]:
        with self._lock:
            if not self.by_hand:
                self.land()
            landed, self._landed = self._landed, []
            return landed

    def forget(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._held.pop(Place("file", slot), None)

    @property
    def num_running(self) -> int:
        """Tickets that have not landed."""
        return len(self._waiting) + len(self._run)

    def land(self, count: int | None = None) -> None:
        """Let the oldest `count` tickets land, or all; the scheduler is woken."""
        with self._lock:
            for _ in range(self.num_running if count is None else count):
                if not self._run:
                    self._run_next()
                self._landed.append(self._run.popleft())
        self.wake()

    def before_step(self) -> None:
        """A step is about to write: copies that read a device block and came before it are run."""
        with self._lock:
            reading = [
                number
                for number, (_, copies) in enumerate(self._waiting)
                if any(copy.source.level == "device" for copy in copies)
            ]
            for _ in range(reading[-1] + 1 if reading else 0):
                self._run_next()

    def _run_next(self) -> None:
        ticket, copies = self._waiting.popleft()
        failed: dict[int, str] = {}
        for index, copy in enumerate(copies):
            if copy.source in self.broken or copy.target in self.broken:
                failed[index] = "broken"
                continue
            self.copied.append(copy)
            held = (
                self.read(copy.source.slot)
                if copy.source.level == "device"
                else self._held[copy.source]
            )
            if copy.target.level == "device":
                self.write(copy.target.slot, held)
            else:
                self._held[copy.target] = held
        self._run.append(LandedCopies(ticket, failed))


def _unset(*_: object) -> None:
    raise RuntimeError("these tiers belong to no executor")
