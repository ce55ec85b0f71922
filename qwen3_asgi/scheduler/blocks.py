"""KV block bookkeeping in plain ints: who holds which block, and which full blocks can be shared.

A block is free, held (reference count >= 1), cached (full, count 0, still findable by its content
and evicted least recently used first), or parked (nobody's, but a copy still writes to it, or a
step still uses it). The tensors behind the ids live in `model/`.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from qwen3_asgi.scheduler.runs import FreeRuns

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

# When blocks must be evicted, a few more are taken along: neighbours merge into runs, and the next
# allocations are adjacent again.
EVICTION_BATCH = 8


@dataclass(frozen=True, slots=True)
class CachedBlock:
    """What a full, immutable block holds; compared before the block is shared."""

    digest: bytes
    parent: bytes
    token_ids: tuple[int, ...]


class BlockPool:
    """All KV blocks of one engine. Owned by the scheduler thread.

    Raises:
        ValueError: a block is released more often than it was acquired (a bug, never a user error).
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        prefix_cache: bool = True,
        on_evict: Callable[[int, CachedBlock], None] | None = None,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        # Changes whenever more may fit than before: a request that did not fit need not be tried
        # again until then.
        self.version = 0
        self._prefix_cache = prefix_cache
        self._on_evict = on_evict
        self._references = [0] * num_blocks
        self._free = FreeRuns(num_blocks)
        self._cached: dict[int, CachedBlock] = {}
        self._by_digest: dict[bytes, int] = {}
        self._unreferenced: OrderedDict[int, None] = OrderedDict()
        self._parked: set[int] = set()
        # How many steps use a block on behalf of requests that have ended.
        self._lingering: dict[int, int] = {}

    @property
    def available(self) -> int:
        """Blocks that `allocate` can still hand out: free, or cached and unreferenced."""
        return len(self._free) + len(self._unreferenced)

    @property
    def used(self) -> int:
        return self.num_blocks - self.available - len(self._parked)

    @property
    def cached(self) -> int:
        """Unreferenced blocks whose content can still be shared."""
        return len(self._unreferenced)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def references(self, block: int) -> int:
        return self._references[block]

    def match(self, token_ids: Sequence[int], digests: Sequence[bytes], root: bytes) -> list[int]:
        """Acquire and return the blocks of the longest cached prefix of `token_ids`.

        At least one token is always left to forward: its logits are needed. `digests` has the
        chain of all blocks before that (`prefix.extend_digests`).
        """
        blocks: list[int] = []
        if not self._prefix_cache:
            return blocks
        size = self.block_size
        parent = root
        for index in range((len(token_ids) - 1) // size):
            digest = digests[index]
            block = self._by_digest.get(digest)
            if block is None:
                break
            content = self._cached[block]
            tokens = tuple(token_ids[index * size : (index + 1) * size])
            if content.token_ids != tokens or content.parent != parent:
                break
            self._acquire(block)
            blocks.append(block)
            parent = digest
        return blocks

    def share(self, blocks: Sequence[int]) -> None:
        """Take one more reference on held blocks that are full."""
        for block in blocks:
            self._references[block] += 1

    def allocate(self, count: int, after: int | None) -> list[int]:
        """Acquire `count` blocks, adjacent to each other and to `after` where possible.

        Raises:
            ValueError: fewer than `count` are available; nothing is acquired then.
        """
        if count > self.available:
            raise ValueError(f"{count} KV blocks wanted, {self.available} available")
        if count > len(self._free):
            self._evict(max(count - len(self._free), EVICTION_BATCH))
        blocks: list[int] = []
        for missing in range(count, 0, -1):
            block = None if after is None else self._free.take_after(after)
            if block is None:
                block = self._free.take(missing)
            if block is None:  # unreachable: availability was checked
                raise ValueError("the free list disagrees with its count")
            self._references[block] = 1
            blocks.append(block)
            after = block
        return blocks

    def commit(self, block: int, digest: bytes, parent: bytes, token_ids: Sequence[int]) -> None:
        """Declare a held block full and computed, so that it can be shared.

        A twin with the same content may be cached already (two equal prompts computed at once);
        then this copy stays private.
        """
        if self._prefix_cache and digest not in self._by_digest:
            self._by_digest[digest] = block
            self._cached[block] = CachedBlock(digest, parent, tuple(token_ids))
            self.version += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Give back one reference on each. A sequence's tail becomes evictable before its head."""
        if blocks:
            self.version += 1
        references, cached = self._references, self._cached
        for block in reversed(blocks):
            count = references[block] - 1
            if count < 0:
                raise ValueError(f"KV block {block} was released twice")
            references[block] = count
            if count:
                continue
            if block in self._lingering:
                self._parked.add(block)
            elif block in cached:
                self._unreferenced[block] = None
            else:
                self._free.add(block)

    def discard(self, blocks: Sequence[int]) -> None:
        """Give back blocks whose content must not be shared: a failed request's own ones."""
        for block in blocks:
            if self._references[block] == 1 and block in self._cached:
                self._forget(block)
        self.release(blocks)

    def park(self, blocks: Sequence[int]) -> None:
        """Held blocks lost their owner while a copy writes to them: nobody's until `unpark`."""
        for block in blocks:
            if self._references[block] != 1 or block in self._cached:
                raise ValueError(f"KV block {block} is shared; it cannot be parked")
            self._references[block] = 0
        self._parked.update(blocks)

    def unpark(self, blocks: Sequence[int]) -> None:
        """The copy has landed: hold them again, to commit and release them."""
        self._parked.difference_update(blocks)
        for block in blocks:
            self._references[block] = 1

    def linger(self, blocks: Sequence[int]) -> None:
        """Held blocks are about to be released while a step uses them: not before `settle`.

        What is cached among them can still be shared meanwhile.
        """
        for block in blocks:
            self._lingering[block] = self._lingering.get(block, 0) + 1

    def settle(self, blocks: Sequence[int]) -> None:
        """The step has landed: what nobody holds any more can be given away."""
        self.version += 1
        for block in reversed(blocks):
            count = self._lingering.pop(block) - 1
            if count:
                self._lingering[block] = count
            elif block in self._parked:
                self._parked.remove(block)
                if block in self._cached:
                    self._unreferenced[block] = None
                else:
                    self._free.add(block)

    def clear_cache(self) -> None:
        """Forget every unreferenced prefix, for good."""
        for block in self._parked & self._cached.keys():
            self._forget(block)
        on_evict, self._on_evict = self._on_evict, None
        self._evict(len(self._unreferenced))
        self._on_evict = on_evict

    def check_integrity(self, tables: Sequence[Sequence[int]]) -> None:
        """Compare the bookkeeping with the block tables of all live requests.

        Raises:
            RuntimeError: a block is lost or counted wrong.
        """
        held = [0] * self.num_blocks
        for table in tables:
            for block in table:
                held[block] += 1
        if held != self._references:
            wrong = [b for b in range(self.num_blocks) if held[b] != self._references[b]]
            raise RuntimeError(f"reference counts differ from the block tables at {wrong[:8]}")
        free = set(self._free)
        states = [
            free,
            self._parked,
            set(self._unreferenced),
            {b for b in range(self.num_blocks) if held[b]},
        ]
        if sum(map(len, states)) != self.num_blocks or len(set().union(*states)) != self.num_blocks:
            raise RuntimeError("a KV block is in no state, or in two")
        if not all(held[b] or b in self._parked for b in self._lingering):
            raise RuntimeError("a KV block that a step still uses was given away")
        if len(free) != len(self._free):
            raise RuntimeError("the free runs disagree with their count")
        for digest, block in self._by_digest.items():
            if self._cached[block].digest != digest or block in free:
                raise RuntimeError(f"the prefix index points at block {block}, which moved on")

    def _acquire(self, block: int) -> None:
        if self._references[block] == 0:
            if block in self._parked:
                self._parked.remove(block)
            else:
                del self._unreferenced[block]
        self._references[block] += 1

    def _evict(self, count: int) -> None:
        for _ in range(min(count, len(self._unreferenced))):
            block, _ = self._unreferenced.popitem(last=False)
            content = self._forget(block)
            self._free.add(block)
            if self._on_evict is not None:
                self._on_evict(block, content)

    def _forget(self, block: int) -> CachedBlock:
        content = self._cached.pop(block)
        del self._by_digest[content.digest]
        return content
