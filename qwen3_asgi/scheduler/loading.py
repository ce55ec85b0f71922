"""The state `loading`: a deferred request waits for its prefix to be copied in from a lower tier.

Offered once: what lies in host memory or in the file behind what the device has cached is copied
into free blocks while others run. When the copy has landed, the blocks are in the prefix cache and
the request is at the front of `deferred`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from qwen3_asgi.scheduler.admission import match_prefix
from qwen3_asgi.scheduler.blocks import BlockPool, CachedBlock
from qwen3_asgi.scheduler.request import Request, State

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from qwen3_asgi.scheduler.executor import Place
    from qwen3_asgi.scheduler.queues import QueueTable
    from qwen3_asgi.scheduler.tiers import TierIndex


@dataclass(slots=True, eq=False)
class Load:
    """One running copy into device blocks. `request` is None once its request is gone."""

    ticket: int
    request: Request | None
    blocks: list[int]
    contents: list[CachedBlock]


class Loading:
    """Owned by the scheduler thread."""

    def __init__(
        self,
        index: TierIndex,
        queues: QueueTable,
        pool: BlockPool,
        clock: Callable[[], float],
    ) -> None:
        self.index = index
        self._clock = clock
        self._queues = queues
        self._pool = pool
        self._loads: dict[int, Load] = {}
        self._fresh: list[Request] = []

    def arrived(self, request: Request) -> None:
        """A request has come to `deferred`: it is offered in the next iteration."""
        self._fresh.append(request)

    def reclaim(self) -> None:
        """Take what has landed: its requests go to the front of `deferred`, in their order."""
        back: list[Request] = []
        for landed in self.index.take_landed():
            load = self._loads.pop(landed.ticket, None)
            if load is not None:
                self._keep(load, landed.failed)
                if load.request is not None:
                    back.append(load.request)
        for request in reversed(back):
            self._queues.put(request, State.DEFERRED, front=True)

    def prefetch(self) -> None:
        """Offer what has arrived since the last time, if it is still waiting."""
        fresh, self._fresh = self._fresh, []
        for request in fresh:
            if request.state is State.DEFERRED:
                self.offer(request)

    def last_offer(self, request: Request) -> bool:
        """`offer` to the first of `deferred`, which is about to be admitted otherwise."""
        return self.offer(request, last_chance=True)

    def offer(self, request: Request, *, last_chance: bool = False) -> bool:
        """Begin to load what the tiers have of this request's prefix; returns whether it waits now.

        Refused, to be asked again with `last_chance`, when there is no room: blocks that running
        requests will need next are not touched.
        """
        if request.offered_to_tiers:
            return False
        pool = self._pool
        count = (len(request.token_ids) - 1) // pool.block_size
        held = match_prefix(request, pool)
        places, contents = self._found(request, len(held), count)
        room = pool.available - self._queues.num_running
        if not places or len(places) > room:
            pool.release(held)
            request.offered_to_tiers = last_chance or not places
            return False
        request.offered_to_tiers = True
        self.index.pin(places)
        blocks = pool.allocate(len(places), held[-1] if held else None)
        request.blocks = held
        ticket = self.index.load(places, blocks, contents)
        request.load = self._loads[ticket] = Load(ticket, request, blocks, contents)
        if not request.admitted:
            request.load_began_at = self._clock()
        self._queues.put(request, State.LOADING)
        return True

    def abandon(self, request: Request) -> None:
        """A loading request leaves: its blocks are nobody's until the copy into them has landed."""
        load, request.load = request.load, None
        if load is not None:
            load.request = None
            self._pool.park(load.blocks)

    @property
    def held_blocks(self) -> list[list[int]]:
        """Blocks that loads hold for live requests, beside those requests' own tables."""
        return [load.blocks for load in self._loads.values() if load.request is not None]

    @property
    def busy(self) -> bool:
        return self.index.busy

    def _found(
        self, request: Request, first: int, count: int
    ) -> tuple[list[Place], list[CachedBlock]]:
        size = self._pool.block_size
        places: list[Place] = []
        contents: list[CachedBlock] = []
        parent = request.digests[first - 1] if first else request.cache_root
        for index in range(first, count):
            digest = request.digests[index]
            tokens = tuple(request.token_ids[index * size : (index + 1) * size])
            place = self.index.find(digest, parent, tokens)
            if place is None:
                break
            places.append(place)
            contents.append(CachedBlock(digest, parent, tokens))
            parent = digest
        return places, contents

    def _keep(self, load: Load, failed: Mapping[int, str]) -> None:
        """What came over whole is cached; a block is of use only if all before it are."""
        request = load.request
        if request is None:
            self._pool.unpark(load.blocks)
        good = min(failed, default=len(load.blocks))
        for block, content in zip(load.blocks[:good], load.contents, strict=False):
            self._pool.commit(block, content.digest, content.parent, content.token_ids)
        self._pool.release(load.blocks)
        if request is not None:
            request.load = None
            if not request.admitted:
                request.load_ended_at = self._clock()
                request.loaded_tokens = good * self._pool.block_size
            self._pool.release(request.blocks)
            request.blocks = []
