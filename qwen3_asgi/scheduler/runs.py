"""Free KV blocks kept as maximal runs, so that a sequence's blocks lie next to each other.

Attention reads adjacent blocks as one view; gathering scattered ones costs as much as the attention
itself. Plain ints; every operation is O(1) except the choice of a run for a new sequence, which is
linear in the number of runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


class FreeRuns:
    """A set of free block ids with their adjacency."""

    __slots__ = ("_length_at", "_num_free", "_start_before")

    def __init__(self, num_blocks: int) -> None:
        # start -> length, and end (exclusive) -> start, of every maximal run.
        self._length_at: dict[int, int] = {}
        self._start_before: dict[int, int] = {}
        self._num_free = 0
        if num_blocks:
            self._insert(0, num_blocks)
            self._num_free = num_blocks

    def __len__(self) -> int:
        return self._num_free

    def __iter__(self) -> Iterator[int]:
        for start, length in self._length_at.items():
            yield from range(start, start + length)

    def add(self, block: int) -> None:
        """Give a block back, merging it with free neighbours."""
        # Written out: a sweep gives thousands back at once.
        length_at, start_before = self._length_at, self._start_before
        end = block + 1
        start = start_before.pop(block, block)
        length = length_at.pop(end, None)
        if length is not None:
            end += length
        length_at[start] = end - start
        start_before[end] = start
        self._num_free += 1

    def take_after(self, block: int) -> int | None:
        """Take `block + 1` if it is free. `block` is in use, so a free successor starts a run."""
        start = block + 1
        if start not in self._length_at:
            return None
        length = self._remove(start)
        if length > 1:
            self._insert(start + 1, length - 1)
        self._num_free -= 1
        return start

    def take(self, count: int) -> int | None:
        """Take one block where `count` more may follow; None if no block is free.

        The longest run is used. From its middle, if both halves are long enough: the block before
        the run belongs to somebody who may still grow into the first half.
        """
        if not self._length_at:
            return None
        start = max(self._length_at, key=self._length_at.__getitem__)
        length = self._remove(start)
        block = start
        if start > 0 and length // 2 > count:
            block = start + length // 2
            self._insert(start, block - start)
        if start + length > block + 1:
            self._insert(block + 1, start + length - block - 1)
        self._num_free -= 1
        return block

    def _insert(self, start: int, length: int) -> None:
        self._length_at[start] = length
        self._start_before[start + length] = start

    def _remove(self, start: int) -> int:
        length = self._length_at.pop(start)
        del self._start_before[start + length]
        return length
