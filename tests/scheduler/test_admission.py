"""Who is let in: first come, first served, under the batch, prefill and KV limits."""

from __future__ import annotations

import pytest

from qwen3_asgi.errors import ContextLengthExceeded, InvalidRequest
from qwen3_asgi.scheduler.request import Limits, Request, State, check_fits
from tests.scheduler.harness import Harness


def admitted(harness: Harness) -> list[object]:
    return [what for kind, what in harness.record.log if kind == "admit"]


def test_first_come_is_first_served() -> None:
    harness = Harness(max_batch=2)
    names = [f"r{i}" for i in range(9)]
    for name in names:
        harness.submit(name, 3)
    harness.run()
    assert admitted(harness) == names


def test_no_more_run_than_the_batch_limit() -> None:
    harness = Harness(max_batch=3)
    for i in range(10):
        harness.submit(f"r{i}", 3, max_tokens=i + 1)
    harness.run()
    running = [load.num_running for load in harness.record.loads]
    assert max(running) == 3
    rows = [row.step for row in harness.executor.rows]
    assert max(rows.count(step) for step in rows) == 3


def test_no_step_forwards_more_prompt_tokens_than_the_budget() -> None:
    harness = Harness(max_prefill_tokens=10)
    for i in range(6):
        harness.submit(f"r{i}", 7 + 3 * i)
    harness.run()
    spent: dict[int, int] = {}
    for row in harness.executor.rows:
        if row.kind == "prefill":
            spent[row.step] = spent.get(row.step, 0) + len(row.token_ids)
    assert max(spent.values()) == 10


def test_nobody_is_admitted_while_the_prefill_budget_is_spoken_for() -> None:
    harness = Harness(max_prefill_tokens=8)
    harness.submit("long", 30)
    harness.submit("short", 2)
    harness.step()
    assert harness.queue(State.PREFILLING) == ["long"]
    assert harness.queue(State.DEFERRED) == ["short"]


def test_long_prompt_does_not_stall_those_who_decode() -> None:
    harness = Harness(max_prefill_tokens=8)
    harness.submit("a", 3, max_tokens=20)
    harness.step()
    harness.submit("long", 60)
    before = len(harness.tokens("a"))
    harness.step(5)
    assert len(harness.tokens("a")) == before + 5


def test_nobody_overtakes_a_request_that_waits_for_blocks() -> None:
    harness = Harness(num_kv_blocks=10)
    harness.submit("a", 15, max_tokens=8)
    harness.step()
    harness.submit("big", 30)
    harness.submit("small", 2)
    harness.step()
    assert harness.queue(State.DEFERRED) == ["big", "small"]
    harness.run()
    assert admitted(harness) == ["a", "big", "small"]


def test_request_without_max_tokens_does_not_reserve_the_context() -> None:
    harness = Harness(num_kv_blocks=16)
    harness.submit("open", 3, max_tokens=None)
    for name in "abc":
        harness.submit(name, 3)
    harness.step()
    assert harness.order() == ["open", "a", "b", "c"]
    assert harness.queue(State.DEFERRED) == []
    assert len(harness.requests["open"].blocks) == 1
    assert harness.scheduler.load.kv_used_blocks == 4


def test_admission_reserves_the_prompt_and_the_next_token() -> None:
    for length, blocks in ((3, 1), (4, 2), (7, 2), (8, 3)):
        harness = Harness()
        harness.submit("r", length)
        harness.step()
        assert len(harness.requests["r"].blocks) == blocks


def test_newcomer_leaves_a_block_for_each_that_runs() -> None:
    harness = Harness(num_kv_blocks=6)
    harness.submit("a", 3, max_tokens=9)
    harness.submit("b", 3, max_tokens=9)
    harness.step()
    harness.submit("c", 11)  # three blocks; four are free, two of them are headroom
    harness.step()
    assert harness.queue(State.DEFERRED) == ["c"]
    harness.run()
    assert harness.record.preempted == []


@pytest.mark.parametrize(
    ("length", "max_tokens"), [(100, 1), (64, 1), (64, None), (1, 64), (10, 1000)]
)
def test_request_that_can_never_fit_is_refused_at_once_with_both_numbers(
    length: int, max_tokens: int | None
) -> None:
    harness = Harness(num_kv_blocks=16)  # 64 tokens
    harness.submit("r", length, max_tokens=max_tokens)
    harness.step()
    end = harness.end("r")
    assert end.reason == "error"
    assert isinstance(end.error, ContextLengthExceeded)
    assert "64 tokens" in str(end.error)
    assert f"{length} tokens" in str(end.error)
    if max_tokens is not None:
        assert f"max_tokens {max_tokens}" in str(end.error)
    assert harness.executor.plans == 0
    harness.check_idle()


def test_context_limit_counts_when_it_is_smaller_than_the_pool() -> None:
    harness = Harness(max_context_tokens=20)
    harness.submit("fits", 10, max_tokens=10)
    harness.submit("open", 10, max_tokens=None)
    harness.submit("over", 10, max_tokens=11)
    harness.run()
    assert harness.end("fits").completion_tokens == 10
    assert harness.end("open").completion_tokens == 10
    assert isinstance(harness.end("over").error, ContextLengthExceeded)


def test_refusal_does_not_hold_up_those_behind_it() -> None:
    harness = Harness(num_kv_blocks=4)
    harness.submit("never", 100)
    harness.submit("r", 3)
    harness.step()
    assert harness.end("never").reason == "error"
    assert harness.num_rows("r") == 1
    harness.run()


def test_empty_prompt_is_refused() -> None:
    harness = Harness()
    harness.submit("r", [])
    harness.run()
    assert isinstance(harness.end("r").error, InvalidRequest)


def test_id_in_use_is_refused_and_its_owner_unharmed() -> None:
    harness = Harness()
    harness.submit("r", 3, max_tokens=6)
    harness.step()
    harness.scheduler.submit(Request("r", [1, 2], max_tokens=1))
    harness.step()
    (refusal,) = harness.ends("r")
    assert isinstance(refusal.error, InvalidRequest)
    harness.step(10)
    assert len(harness.tokens("r")) == 6
    assert [end.reason for end in harness.ends("r")] == ["error", "length"]


LIMITS = Limits(
    block_size=4, num_kv_blocks=5, max_context_tokens=30, max_batch=1, max_prefill_tokens=8
)


@pytest.mark.parametrize(
    ("prompt_len", "max_tokens", "allowed"),
    [(1, None, 19), (19, None, 1), (19, 1, 1), (10, 10, 10), (1, 19, 19)],
)
def test_check_fits_tells_how_many_tokens_may_be_generated(
    prompt_len: int, max_tokens: int | None, allowed: int
) -> None:
    assert check_fits(prompt_len, max_tokens, LIMITS) == allowed


def test_snapshot_counts_waiting_and_running() -> None:
    harness = Harness(max_batch=2)
    for i in range(5):
        harness.submit(f"r{i}", 3)
    harness.step()
    load = harness.scheduler.load
    assert (load.num_running, load.num_waiting) == (2, 3)
    assert (load.kv_used_blocks, load.kv_total_blocks) == (2, 64)
