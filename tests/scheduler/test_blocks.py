"""The block pool alone: who holds what, what can be shared, and what goes first."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen3_asgi.scheduler import prefix
from qwen3_asgi.scheduler.blocks import EVICTION_BATCH, BlockPool
from qwen3_asgi.scheduler.prefix import block_digest, root_digest

SIZE = 2


def computed(pool: BlockPool, token_ids: list[int], salt: str = "") -> list[int]:
    """Blocks of a sequence that was forwarded whole, its full ones committed."""
    blocks = pool.allocate(pool.blocks_for(len(token_ids)), None)
    parent = root_digest(salt)
    for index in range(len(token_ids) // pool.block_size):
        start = index * pool.block_size
        parent = commit(pool, blocks[index], parent, token_ids[start : start + pool.block_size])
    return blocks


def commit(pool: BlockPool, block: int, parent: bytes, token_ids: list[int]) -> bytes:
    digest = prefix.block_digest(parent, token_ids)
    pool.commit(block, digest, parent, token_ids)
    return digest


def match(pool: BlockPool, token_ids: list[int], salt: str = "") -> list[int]:
    root, digests = root_digest(salt), list[bytes]()
    full = (len(token_ids) - 1) // pool.block_size
    prefix.extend_digests(digests, root, token_ids, pool.block_size, full)
    return pool.match(token_ids, digests, root)


def matched(pool: BlockPool, token_ids: list[int], salt: str = "") -> list[int]:
    """What `match` finds, given back at once."""
    blocks = match(pool, token_ids, salt)
    pool.release(blocks)
    return blocks


def test_blocks_of_a_new_sequence_are_adjacent() -> None:
    pool = BlockPool(16, SIZE)
    assert pool.allocate(5, None) == [0, 1, 2, 3, 4]


def test_growing_sequence_stays_one_run() -> None:
    pool = BlockPool(32, SIZE)
    tables = [pool.allocate(2, None) for _ in range(3)]
    for _ in range(3):
        for table in tables:
            table += pool.allocate(1, table[-1])
    for table in tables:
        assert table == list(range(table[0], table[0] + 5))


def test_sequence_jumps_when_its_neighbour_is_taken() -> None:
    pool = BlockPool(4, SIZE)
    first, second = pool.allocate(2, None), pool.allocate(1, None)
    pool.release(first)
    assert sorted(pool.allocate(3, second[-1])) == [0, 1, 3]


def test_more_than_available_acquires_nothing() -> None:
    pool = BlockPool(4, SIZE)
    pool.allocate(3, None)
    with pytest.raises(ValueError, match="2 KV blocks wanted, 1 available"):
        pool.allocate(2, None)
    assert (pool.available, pool.used) == (1, 3)


def test_block_released_twice_is_an_error() -> None:
    pool = BlockPool(4, SIZE)
    blocks = pool.allocate(1, None)
    pool.release(blocks)
    with pytest.raises(ValueError, match="released twice"):
        pool.release(blocks)


def test_full_block_is_found_again_after_its_release() -> None:
    pool = BlockPool(8, SIZE)
    blocks = computed(pool, [1, 2, 3, 4, 5])
    pool.release(blocks)
    assert matched(pool, [1, 2, 3, 4, 5, 6]) == blocks[:2]
    assert (pool.used, pool.cached, pool.available) == (0, 2, 8)


def test_block_is_shared_while_it_is_held() -> None:
    pool = BlockPool(8, SIZE)
    blocks = computed(pool, [1, 2, 3])
    shared = match(pool, [1, 2, 9])
    assert shared == blocks[:1]
    assert pool.references(blocks[0]) == 2
    pool.check_integrity([blocks, shared])


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5])
def test_match_leaves_at_least_one_token_to_forward(length: int) -> None:
    pool = BlockPool(8, SIZE)
    pool.release(computed(pool, [1, 2, 3, 4]))
    assert len(matched(pool, [1, 2, 3, 4, 5][:length])) == (length - 1) // SIZE


def test_match_stops_at_the_first_difference() -> None:
    pool = BlockPool(8, SIZE)
    pool.release(computed(pool, [1, 2, 3, 4, 5, 6]))
    assert len(matched(pool, [1, 2, 3, 9, 5, 6, 7])) == 1
    assert len(matched(pool, [9, 2, 3, 4, 5, 6, 7])) == 0
    assert len(matched(pool, [3, 4, 5])) == 0, "the same tokens at another place"


def test_different_salts_never_share() -> None:
    pool = BlockPool(8, SIZE)
    pool.release(computed(pool, [1, 2, 3, 4], "alice"))
    assert matched(pool, [1, 2, 3, 4, 5], "bob") == []
    assert matched(pool, [1, 2, 3, 4, 5]) == []
    assert len(matched(pool, [1, 2, 3, 4, 5], "alice")) == 2


def test_tokens_are_compared_even_when_the_digests_collide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix, "block_digest", lambda parent, token_ids: b"same")
    pool = BlockPool(8, SIZE)
    first, second = computed(pool, [1, 2, 3]), computed(pool, [7, 8, 9])
    assert matched(pool, [1, 2, 5]) == first[:1]
    assert matched(pool, [7, 8, 5]) == []
    pool.release(first + second)
    assert matched(pool, [7, 8, 5]) == []
    pool.check_integrity([])


def test_parents_are_compared_even_when_the_digests_collide(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(prefix, "block_digest", lambda parent, token_ids: bytes(token_ids))
    pool = BlockPool(8, SIZE)
    pool.release(computed(pool, [1, 2, 3, 4]))
    assert matched(pool, [3, 4, 5]) == []
    assert matched(pool, [1, 2, 5, 6, 3, 4, 7]) != []
    assert len(matched(pool, [1, 2, 3, 4, 5])) == 2


def test_twin_of_a_cached_block_stays_private() -> None:
    pool = BlockPool(8, SIZE)
    first, twin = computed(pool, [1, 2, 3]), computed(pool, [1, 2, 3])
    assert first[0] != twin[0]
    pool.release(twin)
    assert pool.cached == 0, "the twin is free, not cached"
    pool.release(first)
    assert matched(pool, [1, 2, 3]) == first[:1]


def test_least_recently_used_prefix_is_evicted_first() -> None:
    pool = BlockPool(EVICTION_BATCH * 3, SIZE)
    batch = EVICTION_BATCH * SIZE
    prompts = [list(range(n, n + batch)) for n in (100, 200, 300)]
    for prompt in prompts:
        pool.release(computed(pool, prompt))
    matched(pool, [*prompts[0], 0])  # used again, so 200 is the oldest now
    pool.allocate(1, None)
    found = [len(matched(pool, [*prompt, 0])) for prompt in prompts]
    assert found == [EVICTION_BATCH, 0, EVICTION_BATCH]


def test_tail_of_a_prefix_is_evicted_before_its_head() -> None:
    pool = BlockPool(EVICTION_BATCH * 2, SIZE)
    prompt = list(range(EVICTION_BATCH * 2 * SIZE))
    blocks = computed(pool, prompt)
    pool.release(blocks)
    pool.allocate(1, None)
    assert matched(pool, [*prompt, 0]) == blocks[:EVICTION_BATCH]


def test_free_blocks_are_used_before_anything_is_evicted() -> None:
    pool = BlockPool(8, SIZE)
    pool.release(computed(pool, [1, 2, 3, 4]))
    pool.allocate(6, None)
    assert len(matched(pool, [1, 2, 3, 4, 5])) == 2


def test_held_blocks_are_never_evicted() -> None:
    pool = BlockPool(4, SIZE)
    held = computed(pool, [1, 2, 3, 4])
    pool.allocate(2, None)
    assert pool.available == 0
    assert matched(pool, [1, 2, 3, 4, 5]) == held


def test_discarded_blocks_are_not_shared_but_those_of_others_are() -> None:
    pool = BlockPool(8, SIZE)
    first = computed(pool, [1, 2])
    shared = match(pool, [1, 2, 3, 4, 5])
    tail = pool.allocate(1, shared[-1])
    commit(pool, tail[0], block_digest(root_digest(""), [1, 2]), [3, 4])
    pool.discard(shared + tail)
    assert matched(pool, [1, 2, 3, 4, 5]) == first
    pool.check_integrity([first])


def test_cleared_cache_finds_nothing_that_was_unreferenced() -> None:
    pool = BlockPool(8, SIZE)
    pool.release(computed(pool, [1, 2, 3, 4]))
    held = computed(pool, [7, 8])
    pool.clear_cache()
    assert matched(pool, [1, 2, 3, 4, 5]) == []
    assert matched(pool, [7, 8, 9]) == held
    assert pool.cached == 0


def test_pool_without_prefix_cache_shares_nothing() -> None:
    pool = BlockPool(8, SIZE, prefix_cache=False)
    pool.release(computed(pool, [1, 2, 3, 4]))
    assert matched(pool, [1, 2, 3, 4, 5]) == []
    assert pool.cached == 0


def test_integrity_check_sees_a_lost_block() -> None:
    pool = BlockPool(4, SIZE)
    pool.allocate(1, None)
    with pytest.raises(RuntimeError, match="reference counts"):
        pool.check_integrity([])


def test_digests_are_stable_across_processes() -> None:
    root = root_digest("")
    assert root.hex() == "8b0f1c5ee594084b8528c67d367efc75"
    assert block_digest(root, [1, 2]).hex() == "5dbd9ea914bb7a3888efd15a6aeb5fdf"


def test_digests_tell_parents_salts_and_token_borders_apart() -> None:
    assert root_digest("") != root_digest("a")
    assert block_digest(b"p", [1, 23]) != block_digest(b"p", [12, 3])
    assert block_digest(b"p", [1, 2]) != block_digest(b"q", [1, 2])


@dataclass
class NaivePool:
    """The same promises in the plainest way: contents in a dict, order of use in a list."""

    free: set[int]
    held: Counter[int] = field(default_factory=Counter)
    content: dict[int, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    unreferenced: list[int] = field(default_factory=list)

    def match(self, tokens: list[int], salt: str) -> list[int]:
        blocks: list[int] = []
        for end in range(SIZE, len(tokens), SIZE):
            wanted = (salt, tuple(tokens[:end]))
            found = [block for block, content in self.content.items() if content == wanted]
            if not found:
                break
            blocks += found
        for block in blocks:
            if not self.held[block]:
                self.unreferenced.remove(block)
            self.held[block] += 1
        return blocks

    def make_room(self, count: int) -> None:
        if count > len(self.free):
            for _ in range(max(count - len(self.free), EVICTION_BATCH)):
                if self.unreferenced:
                    block = self.unreferenced.pop(0)
                    del self.content[block]
                    self.free.add(block)

    def release(self, blocks: list[int]) -> None:
        for block in reversed(blocks):
            self.held[block] -= 1
            if not self.held[block]:
                (self.unreferenced.append if block in self.content else self.free.add)(block)


@given(
    st.lists(
        st.one_of(
            st.tuples(
                st.just("run"),
                st.lists(st.integers(0, 1), min_size=1, max_size=9),
                st.sampled_from(["", "s"]),
            ),
            st.tuples(st.just("end"), st.integers(0, 9), st.just("")),
        ),
        max_size=40,
    ),
    st.integers(1, 24),
)
def test_pool_agrees_with_a_naive_one(
    operations: list[tuple[str, list[int] | int, str]], num_blocks: int
) -> None:
    """Sequences come (match, allocate the rest, commit what is full) and go, in any order."""
    pool, naive = BlockPool(num_blocks, SIZE), NaivePool(set(range(num_blocks)))
    tables: list[list[int]] = []
    for _, what, salt in operations:
        if isinstance(what, int):
            if tables:
                table = tables.pop(what % len(tables))
                pool.release(table)
                naive.release(table)
        else:
            table = match(pool, what, salt)
            assert table == naive.match(what, salt)
            missing = pool.blocks_for(len(what)) - len(table)
            if missing > pool.available:
                assert missing > len(naive.free) + len(naive.unreferenced)
                pool.release(table)
                naive.release(table)
                continue
            naive.make_room(missing)
            fresh = pool.allocate(missing, table[-1] if table else None)
            assert naive.free.issuperset(fresh)
            naive.free.difference_update(fresh)
            naive.held.update(fresh)
            table += fresh
            tables.append(table)
            digests: list[bytes] = []
            prefix.extend_digests(digests, root_digest(salt), what, SIZE, len(what) // SIZE)
            for index in range(len(table) - len(fresh), len(digests)):
                tokens = what[index * SIZE : (index + 1) * SIZE]
                parent = digests[index - 1] if index else root_digest(salt)
                pool.commit(table[index], digests[index], parent, tokens)
                content = (salt, tuple(what[: (index + 1) * SIZE]))
                if content not in naive.content.values():
                    naive.content[table[index]] = content
        pool.check_integrity(tables)
        assert pool.available == len(naive.free) + len(naive.unreferenced)
        assert pool.cached == len(naive.unreferenced)
        assert pool.used == sum(1 for count in naive.held.values() if count)
