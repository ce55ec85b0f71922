"""Running out of KV blocks: the youngest gives way, comes back first, and nobody notices."""

from __future__ import annotations

import pytest

from qwen3_asgi.scheduler.request import State
from tests.scheduler.harness import Harness


def crowded(names: str = "abc", *, num_kv_blocks: int = 9, max_tokens: int = 20) -> Harness:
    """More output wanted than the pool can hold at once: 3 prompt and 20 output tokens each."""
    harness = Harness(num_kv_blocks=num_kv_blocks)
    for name in names:
        harness.submit(name, 3, max_tokens=max_tokens)
    return harness


def until_preempted(harness: Harness) -> None:
    for _ in range(100):
        if harness.record.preempted:
            return
        harness.step()
    raise AssertionError("nobody was preempted")


def test_preempted_request_goes_on_without_gap_or_repeat() -> None:
    harness = crowded()
    harness.run()
    assert harness.record.preempted, "the pool was meant to be too small"
    for name in "abc":
        assert harness.tokens(name) == harness.expected(name, 20)
        assert harness.end(name).completion_tokens == 20


def test_youngest_running_request_gives_way() -> None:
    harness = crowded()
    until_preempted(harness)
    assert harness.record.preempted[0] == "c"


def test_oldest_request_is_never_preempted() -> None:
    harness = crowded("abcde")
    harness.run()
    assert "a" not in harness.record.preempted
    assert harness.requests["a"].num_preemptions == 0


def test_prefilling_request_gives_way_before_an_active_one() -> None:
    harness = Harness(num_kv_blocks=10, max_prefill_tokens=2)
    harness.submit("old", 7, max_tokens=12)
    harness.step(4)
    harness.submit("long", 24)  # takes seven of the eight free blocks, and twelve steps
    until_preempted(harness)
    assert harness.record.preempted == ["long"]


def test_preempted_request_returns_to_the_front_of_the_queue() -> None:
    harness = crowded("abc")
    harness.submit("later", 30)
    until_preempted(harness)
    assert harness.queue(State.DEFERRED)[0] == harness.record.preempted[-1]
    assert harness.queue(State.DEFERRED)[-1] == "later"


def test_several_preempted_requests_keep_their_order() -> None:
    harness = crowded("abcdef", num_kv_blocks=12)
    for _ in range(200):
        harness.step()
        order = harness.order()
        assert order == sorted(order), "who came first is no longer served first"
    assert len(set(harness.record.preempted)) > 2
    harness.run()


def test_preempted_request_gives_back_every_block() -> None:
    harness = crowded()
    until_preempted(harness)
    request = harness.requests["c"]
    assert request.state is State.DEFERRED
    assert (request.blocks, request.num_computed, request.num_preemptions) == ([], 0, 1)


def test_preempted_request_finds_its_tokens_in_the_prefix_cache() -> None:
    harness = Harness(num_kv_blocks=21)
    for name, length, max_tokens in (("a", 3, 10), ("b", 3, 10), ("c", 60, 20)):
        harness.submit(name, length, max_tokens=max_tokens)
    harness.run()
    assert harness.record.preempted == ["c"]
    *_, again = [row for row in harness.executor.rows_of("c") if row.kind == "prefill"]
    assert again.start == 32, "half of its blocks were evicted, the other half is found"
    assert harness.tokens("c") == harness.expected("c", 20)


def test_cached_tokens_counts_the_first_admission_only() -> None:
    harness = crowded()
    harness.run()
    assert {harness.end(name).cached_tokens for name in "abc"} == {0}
    assert harness.record.cached_tokens == {"a": 0, "b": 0, "c": 0}


def test_preempted_request_can_be_cancelled_while_it_waits() -> None:
    harness = crowded()
    until_preempted(harness)
    (victim,) = harness.record.preempted
    rows = harness.num_rows(victim)
    harness.cancel(victim)
    harness.step()
    assert harness.end(victim).reason == "abort"
    assert harness.record.swept_from == {victim: State.DEFERRED}
    assert harness.executor.dropped == [victim], "it was admitted once"
    harness.run()
    assert harness.num_rows(victim) == rows


def test_single_request_may_fill_the_whole_pool() -> None:
    harness = Harness(num_kv_blocks=4)
    harness.submit("r", 3, max_tokens=None)
    harness.run()
    assert harness.end("r").completion_tokens == 4 * 4 - 3
    assert harness.record.preempted == []


@pytest.mark.parametrize("num_kv_blocks", range(6, 16))
def test_every_pool_that_holds_the_longest_request_serves_them_all(num_kv_blocks: int) -> None:
    harness = crowded("abcde", num_kv_blocks=num_kv_blocks)
    harness.run()
    for name in "abcde":
        assert harness.tokens(name) == harness.expected(name, 20)


def test_preemption_without_a_prefix_cache_recomputes_everything() -> None:
    harness = Harness(num_kv_blocks=9, prefix_cache=False)
    for name in "abc":
        harness.submit(name, 3, max_tokens=20)
    harness.run()
    assert harness.record.preempted
    assert {row.start for row in harness.executor.rows if row.kind == "prefill"} == {0}
    for name in "abc":
        assert harness.tokens(name) == harness.expected(name, 20)
