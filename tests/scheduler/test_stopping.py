"""Why a generation ends: eos, a stop id, a stop string, or the token limit."""

from __future__ import annotations

import pytest

from qwen3_asgi.errors import GenerationFailed
from tests.scheduler.harness import Harness, prompt_of


def test_max_tokens_ends_with_length() -> None:
    harness = Harness()
    harness.submit("r", 3, max_tokens=5)
    harness.run()
    end = harness.end("r")
    assert (end.reason, end.completion_tokens, end.prompt_tokens) == ("length", 5, 3)
    assert (end.stop_reason, end.stop_token, end.error) == (None, None, None)
    assert harness.tokens("r") == harness.expected("r", 5)


def test_eos_ends_with_stop_and_is_named() -> None:
    harness = Harness()
    harness.executor.eos_after["r"] = 3
    harness.submit("r", 3, max_tokens=20, eos_token_ids=[0])
    harness.run()
    end = harness.end("r")
    assert (end.reason, end.completion_tokens) == ("stop", 4)
    assert (end.stop_reason, end.stop_token) == (None, 0), "eos is no stop reason"
    assert harness.tokens("r") == [*harness.expected("r", 3), 0]


def test_ignored_eos_does_not_end_the_output() -> None:
    harness = Harness()
    harness.executor.eos_after["r"] = 3
    harness.submit("r", 3, max_tokens=6)
    harness.run()
    assert harness.end("r").reason == "length"
    assert harness.tokens("r")[3:] == [0, 0, 0]


def test_stop_id_ends_with_stop_and_is_the_reason() -> None:
    harness = Harness()
    harness.submit("r", 3, max_tokens=1)
    fourth = harness.expected("r", 4)[3]
    harness.submit("s", prompt_of("r", 3), max_tokens=20, stop_token_ids=[fourth])
    harness.run()
    end = harness.end("s")
    assert (end.reason, end.stop_reason, end.stop_token) == ("stop", fourth, fourth)
    assert end.completion_tokens == 4


def test_stop_check_sees_each_token_and_ends_the_output() -> None:
    harness = Harness()
    seen: list[int] = []

    def stop_check(token_id: int) -> str | None:
        seen.append(token_id)
        return "END" if len(seen) == 3 else None

    harness.submit("r", 3, max_tokens=20, stop_check=stop_check)
    harness.run()
    end = harness.end("r")
    assert (end.reason, end.stop_reason, end.stop_token) == ("stop", "END", None)
    assert seen == harness.tokens("r") == harness.expected("r", 3)


def test_stop_wins_over_length_on_the_last_token() -> None:
    harness = Harness()
    harness.executor.eos_after["r"] = 4
    harness.submit("r", 3, max_tokens=5, eos_token_ids=[0])
    harness.run()
    assert harness.end("r").reason == "stop"


@pytest.mark.parametrize("min_tokens", [0, 1, 2, 5])
def test_eos_is_banned_until_min_tokens(min_tokens: int) -> None:
    harness = Harness()
    harness.executor.eos_after["r"] = 0
    harness.submit("r", 3, max_tokens=20, min_tokens=min_tokens, eos_token_ids=[0])
    harness.run()
    assert harness.end("r").completion_tokens == min_tokens + 1
    assert harness.tokens("r") == [*harness.expected("r", min_tokens), 0]


def test_last_token_and_the_end_come_in_one_event() -> None:
    harness = Harness()
    harness.submit("r", 3, max_tokens=2)
    harness.run()
    assert [(event.token is None, event.finish is None) for event in harness.record.events] == [
        (False, True),
        (False, False),
    ]


def test_finished_request_is_forwarded_no_more() -> None:
    harness = Harness()
    harness.submit("r", 3, max_tokens=3)
    harness.submit("s", 3, max_tokens=9)
    harness.run()
    assert harness.num_rows("r") == 3
    assert sorted(harness.executor.dropped) == ["r", "s"]


def test_end_is_told_after_a_snapshot_without_the_request() -> None:
    harness = Harness()
    harness.submit("r", 3, max_tokens=1)
    harness.step()
    assert harness.record.log[-1] == ("deliver", ("r",))
    assert harness.scheduler.load.idle


def test_failing_stop_check_ends_only_its_own_request() -> None:
    harness = Harness()

    def stop_check(token_id: int) -> str | None:
        raise ValueError("bad regular expression")

    harness.submit("r", 3, max_tokens=9, stop_check=stop_check)
    harness.submit("s", 3, max_tokens=9)
    harness.run()
    assert harness.end("r").reason == "error"
    assert isinstance(harness.end("r").error, GenerationFailed)
    assert harness.tokens("s") == harness.expected("s", 9)
