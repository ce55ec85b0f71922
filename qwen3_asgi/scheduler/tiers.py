"""Which KV blocks lie outside of the device, and where: host memory first, a file behind it.

Plain ints and digests; `executor.KVTiers` moves the bytes. A slot is free, filling (a copy is on
its way in), ready (findable, least recently used evicted first) or pinned (ready, and a copy is
reading it). Nothing is findable before its copy has landed.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import islice
from typing import TYPE_CHECKING

from qwen3_asgi.scheduler.executor import Copy, KVTiers, LandedCopies, Place

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from qwen3_asgi.scheduler.blocks import CachedBlock

# The part of the host's slots that is kept free by moving the oldest to the file ahead of need.
SPARE_PART = 8


class Level:
    """The slots of one level."""

    def __init__(self, name: str, num_slots: int) -> None:
        self.name = name
        self._free = list(range(num_slots - 1, -1, -1))
        self._content: dict[int, CachedBlock] = {}
        self._by_digest: dict[bytes, int] = {}
        self._ready: OrderedDict[int, None] = OrderedDict()
        self._pins: dict[int, int] = {}
        self.num_slots = num_slots

    @property
    def num_free(self) -> int:
        return len(self._free)

    def holds(self, digest: bytes) -> bool:
        """Whether it is there, or on its way in."""
        return digest in self._by_digest

    def find(self, digest: bytes, parent: bytes, token_ids: tuple[int, ...]) -> int | None:
        """The slot with this content, ready to be read."""
        slot = self._by_digest.get(digest)
        if slot is None or not (slot in self._ready or slot in self._pins):
            return None
        content = self._content[slot]
        return slot if content.token_ids == token_ids and content.parent == parent else None

    def reserve(self, content: CachedBlock) -> int | None:
        """A free slot for a copy that is about to begin; it is filling from now on."""
        if not self._free:
            return None
        slot = self._free.pop()
        self._content[slot] = content
        self._by_digest[content.digest] = slot
        return slot

    def filled(self, slot: int) -> None:
        """The copy has landed: it can be found."""
        self._ready[slot] = None

    def drop(self, slot: int) -> None:
        """Forget the content of a slot that nobody reads; it is free."""
        content = self._content.pop(slot)
        if self._by_digest.get(content.digest) == slot:
            del self._by_digest[content.digest]
        self._ready.pop(slot, None)
        self._pins.pop(slot, None)
        self._free.append(slot)

    def drop_if_unread(self, slot: int) -> bool:
        if slot not in self._ready:
            return False
        self.drop(slot)
        return True

    def drop_oldest(self) -> int | None:
        """Free the least recently used slot, if there is one that nobody reads."""
        for slot in self._ready:
            self.drop(slot)
            return slot
        return None

    def oldest(self, count: int) -> list[tuple[int, CachedBlock]]:
        """The least recently used that nobody reads."""
        return [(slot, self._content[slot]) for slot in islice(self._ready, count)]

    def pin(self, slot: int) -> None:
        self._ready.pop(slot, None)
        self._pins[slot] = self._pins.get(slot, 0) + 1

    def unpin(self, slot: int) -> None:
        """The most recently used now."""
        pins = self._pins.pop(slot) - 1
        if pins:
            self._pins[slot] = pins
        else:
            self._ready[slot] = None

    def put_restored(self, slots: Mapping[int, CachedBlock]) -> None:
        self._free = [slot for slot in self._free if slot not in slots]
        for slot, content in slots.items():
            self._content[slot] = content
            self._by_digest[content.digest] = slot
            self._ready[slot] = None

    def check_integrity(self) -> None:
        """
        Raises:
            RuntimeError: a slot is in no state, or in two.
        """
        filling = set(self._content) - set(self._ready) - set(self._pins)
        states = [set(self._free), set(self._ready), set(self._pins), filling]
        if sum(map(len, states)) != self.num_slots or len(set().union(*states)) != self.num_slots:
            raise RuntimeError(f"a slot of level {self.name} is in no state, or in two")


class TierIndex:
    """The levels of one executor and the copies between them. Owned by the scheduler thread."""

    def __init__(self, tiers: KVTiers) -> None:
        self._tiers = tiers
        self.host = Level("host", tiers.host_slots)
        self.file = Level("file", tiers.file_slots)
        self.file.put_restored(tiers.restored())
        self._levels = {"host": self.host, "file": self.file}
        self._first = self.host if tiers.host_slots else self.file
        self._spare = -(-tiers.host_slots // SPARE_PART)
        self._stores: list[Copy] = []
        self._begun: dict[int, Sequence[Copy]] = {}

    @property
    def busy(self) -> bool:
        """Whether a copy is on its way."""
        return bool(self._begun)

    def find(self, digest: bytes, parent: bytes, token_ids: tuple[int, ...]) -> Place | None:
        for level in (self.host, self.file):
            slot = level.find(digest, parent, token_ids)
            if slot is not None:
                return Place(level.name, slot)
        return None

    def store(self, block: int, content: CachedBlock) -> None:
        """A block is being evicted from the device: keep it, if there is room for it.

        The copy begins with `flush`, before anything else can be written to the block.
        """
        if self.host.holds(content.digest) or self.file.holds(content.digest):
            return
        level = self._first
        slot = self._make_room(level, content)
        if slot is not None:
            self._stores.append(Copy(Place("device", block), Place(level.name, slot), content))

    def flush(self) -> None:
        """Begin the copies that make room: off the device, and from host memory to the file."""
        stores, self._stores = self._stores, []
        # A ticket each: what is stored shall be found before the slower file has been written.
        for copies in (stores, self._demotions()):
            if copies:
                self._begun[self._tiers.begin(copies)] = copies

    def pin(self, places: Sequence[Place]) -> None:
        """Keep these until they are loaded: making room for them may evict others."""
        for place in places:
            self._levels[place.level].pin(place.slot)

    def load(
        self, places: Sequence[Place], blocks: Sequence[int], contents: Sequence[CachedBlock]
    ) -> int:
        """Begin copying these places, which are pinned, into device blocks; returns the ticket."""
        self.flush()  # a block that was evicted for this must be read before it is written
        copies = [
            Copy(place, Place("device", block), content)
            for place, block, content in zip(places, blocks, contents, strict=True)
        ]
        ticket = self._tiers.begin(copies)
        self._begun[ticket] = copies
        return ticket

    def take_landed(self) -> list[LandedCopies]:
        """What has landed since the last call; the index is up to date with it."""
        landed = list(self._tiers.landed())
        for end in landed:
            for index, copy in enumerate(self._begun.pop(end.ticket)):
                self._land(copy, failed=index in end.failed)
        return landed

    def clear(self) -> None:
        """Forget everything that no copy is reading or writing."""
        for level in (self.host, self.file):
            while (slot := level.drop_oldest()) is not None:
                if level is self.file:
                    self._tiers.forget([slot])

    def check_integrity(self) -> None:
        self.host.check_integrity()
        self.file.check_integrity()

    def _demotions(self) -> list[Copy]:
        if not self.file.num_slots or not self.host.num_slots:
            return []
        copies = []
        on_their_way = sum(
            copy.target.level == "file" for copies in self._begun.values() for copy in copies
        )
        wanted = self._spare - self.host.num_free - on_their_way
        for slot, content in self.host.oldest(max(0, wanted)):
            if self.file.holds(content.digest):
                self.host.drop(slot)
                continue
            target = self._make_room(self.file, content)
            if target is None:
                break
            self.host.pin(slot)
            copies.append(Copy(Place("host", slot), Place("file", target), content))
        return copies

    def _make_room(self, level: Level, content: CachedBlock) -> int | None:
        if not level.num_free:
            dropped = level.drop_oldest()
            if dropped is not None and level is self.file:
                self._tiers.forget([dropped])
        return level.reserve(content)

    def _land(self, copy: Copy, *, failed: bool) -> None:
        source, target = copy.source, copy.target
        if source.level != "device":
            level = self._levels[source.level]
            level.unpin(source.slot)
            # A source that can't be read is no use; one that was moved on makes room.
            useless = failed or target.level == "file"
            if useless and level.drop_if_unread(source.slot) and level is self.file:
                self._tiers.forget([source.slot])
        if target.level != "device":
            if failed:
                self._levels[target.level].drop(target.slot)
            else:
                self._levels[target.level].filled(target.slot)
