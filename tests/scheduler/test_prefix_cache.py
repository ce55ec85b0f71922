"""The prefix cache seen from outside: less is forwarded, and nothing else changes."""

from __future__ import annotations

import pytest

from qwen3_asgi.testing.fake_executor import generate
from tests.scheduler.harness import Harness

PROMPT = list(range(100, 122))  # five full blocks of four, and two tokens


def first_row_start(harness: Harness, name: str) -> int:
    return harness.executor.rows_of(name)[0].start


def test_second_request_skips_the_cached_prefix_and_says_the_same() -> None:
    harness = Harness()
    harness.submit("first", PROMPT)
    harness.run()
    harness.submit("second", PROMPT)
    harness.run()
    assert first_row_start(harness, "second") == 20
    assert harness.tokens("second") == harness.tokens("first") == generate(PROMPT, 4)
    assert harness.end("first").cached_tokens == 0
    assert harness.end("second").cached_tokens == 20
    assert harness.record.cached_tokens == {"first": 0, "second": 20}


def test_prefix_is_shared_while_its_owner_still_runs() -> None:
    harness = Harness()
    harness.submit("first", PROMPT, max_tokens=20)
    harness.step(2)
    harness.submit("second", PROMPT, max_tokens=20)
    harness.step()
    first, second = (harness.requests[name].blocks for name in ("first", "second"))
    assert first[:5] == second[:5]
    assert not set(first[5:]) & set(second[5:])
    harness.cancel("first")
    harness.run()
    assert harness.tokens("second") == generate(PROMPT, 20)


def test_answer_is_part_of_the_prefix_of_the_next_turn() -> None:
    harness = Harness()
    harness.submit("first", PROMPT, max_tokens=6)
    harness.run()
    harness.submit("next", [*PROMPT, *harness.tokens("first"), 1, 2, 3])
    harness.run()
    assert first_row_start(harness, "next") == 24


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 20])
def test_at_least_one_token_is_forwarded(length: int) -> None:
    harness = Harness()
    harness.submit("first", PROMPT[:length])
    harness.run()
    harness.submit("second", PROMPT[:length])
    harness.run()
    start = first_row_start(harness, "second")
    assert start < length
    assert start == (length - 1) // 4 * 4
    assert harness.tokens("second") == harness.expected("second", 4)


def test_two_equal_prompts_in_one_step_do_not_disturb_each_other() -> None:
    harness = Harness()
    harness.submit("a", PROMPT, max_tokens=9)
    harness.submit("b", PROMPT, max_tokens=9)
    harness.run()
    assert harness.tokens("a") == harness.tokens("b") == generate(PROMPT, 9)


def test_other_salt_forwards_everything() -> None:
    harness = Harness()
    harness.submit("alice", PROMPT, cache_salt="alice")
    harness.run()
    harness.submit("bob", PROMPT, cache_salt="bob")
    harness.submit("anybody", PROMPT)
    harness.run()
    assert first_row_start(harness, "bob") == first_row_start(harness, "anybody") == 0


def test_switched_off_cache_forwards_everything() -> None:
    harness = Harness(prefix_cache=False)
    for name in ("first", "second"):
        harness.submit(name, PROMPT)
        harness.run()
        assert first_row_start(harness, name) == 0
    assert harness.scheduler.load.kv_cached_blocks == 0


def test_cancelled_request_leaves_its_full_blocks_to_the_next() -> None:
    harness = Harness(max_prefill_tokens=12)
    harness.submit("first", PROMPT)
    harness.step()
    harness.cancel("first")
    harness.step()
    assert harness.scheduler.load.kv_cached_blocks == 3
    harness.submit("second", PROMPT)
    harness.run()
    assert first_row_start(harness, "second") == 12
    assert harness.tokens("second") == generate(PROMPT, 4)


def test_blocks_of_a_failed_step_are_not_shared() -> None:
    harness = Harness(max_prefill_tokens=12)
    harness.submit("first", PROMPT)
    harness.step()

    def fail(plan: object) -> None:
        raise RuntimeError("out of memory")

    harness.executor.before_step = fail
    harness.step()
    assert harness.end("first").reason == "error"
    harness.executor.before_step = None
    harness.submit("second", PROMPT)
    harness.run()
    assert first_row_start(harness, "second") == 0
    assert harness.tokens("second") == generate(PROMPT, 4)


def test_blocks_of_a_failed_row_are_not_shared() -> None:
    harness = Harness()
    harness.executor.row_errors["first"] = "NaN"
    harness.submit("first", PROMPT)
    harness.run()
    harness.submit("second", PROMPT)
    harness.run()
    assert first_row_start(harness, "second") == 0
    assert harness.tokens("second") == generate(PROMPT, 4)


def test_prefix_that_others_hold_survives_a_failure() -> None:
    harness = Harness()
    harness.submit("good", PROMPT, max_tokens=20)
    harness.step()
    harness.executor.row_errors["bad"] = "NaN"
    harness.submit("bad", PROMPT)
    harness.step()
    assert harness.end("bad").reason == "error"
    harness.submit("next", PROMPT)
    harness.run()
    assert first_row_start(harness, "next") == 20
    assert harness.tokens("good") == generate(PROMPT, 20)
    assert harness.tokens("next") == generate(PROMPT, 4)


def test_cleared_cache_forwards_everything_again() -> None:
    harness = Harness()
    harness.submit("first", PROMPT)
    harness.run()
    harness.scheduler.clear_prefix_cache()
    harness.step()
    assert harness.scheduler.load.kv_cached_blocks == 0
    harness.submit("second", PROMPT)
    harness.run()
    assert first_row_start(harness, "second") == 0
