"""Stop strings: what is shown, what is held back, and where both sides stop."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen3_asgi.text.output import OutputAssembler
from qwen3_asgi.text.stop import StopStringCheck, StopStrings
from tests.text.toy import byte_ids, toy_tokenizer

STOPS = st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=4)
CHUNKS = st.lists(st.text("abc", max_size=5), max_size=12)


def first_stop(text: str, stops: list[str]) -> tuple[int, int, str] | None:
    """(end, start, stop) of the stop string that is complete first, the longest of several."""
    found = [(start + len(stop), start, stop) for stop in stops if (start := text.find(stop)) >= 0]
    return min(found, default=None)


@pytest.mark.parametrize(
    ("stops", "chunks", "shown", "matched"),
    [
        (["END"], ["abcEND"], ["abc"], "END"),
        (["END"], ["a", "E", "N", "D", "x"], ["a", "", "", "", ""], "END"),
        (["END"], ["a", "E", "x"], ["a", "", "Ex"], None),
        (["END"], ["EEN", "D"], ["E", ""], "END"),
        (["aab"], ["aaaab"], ["aa"], "aab"),
        (["abcd", "bc"], ["a", "b", "c"], ["", "", "a"], "bc"),
        (["abcd", "bc"], ["abcd"], ["a"], "bc"),
        (["bc", "abc"], ["xabc"], ["x"], "abc"),
        (["\n\n"], ["a\n", "\nb"], ["a", ""], "\n\n"),
    ],
)
def test_table(stops: list[str], chunks: list[str], shown: list[str], matched: str | None) -> None:
    stop = StopStrings(stops)
    assert [stop.push(chunk) for chunk in chunks] == shown
    assert stop.matched == matched


def test_flush_shows_what_was_held_back() -> None:
    stop = StopStrings(["END"])
    assert stop.push("xEN") == "x"
    assert stop.flush() == "EN"
    assert stop.flush() == ""


def test_an_empty_stop_string_is_an_error() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopStrings([""])


@given(STOPS, CHUNKS)
def test_matches_what_find_finds_in_the_whole_text(stops: list[str], chunks: list[str]) -> None:
    text = "".join(chunks)
    stop = StopStrings(stops)
    shown = "".join(stop.push(chunk) for chunk in chunks) + stop.flush()
    expected = first_stop(text, stops)
    assert stop.matched == (expected[2] if expected else None)
    assert shown == (text[: expected[1]] if expected else text)


@given(STOPS, CHUNKS)
def test_holds_back_only_what_may_become_a_stop_string(stops: list[str], chunks: list[str]) -> None:
    stop = StopStrings(stops)
    seen = shown = ""
    for chunk in chunks:
        seen += chunk
        shown += stop.push(chunk)
        if stop.matched is None:
            held = seen.removeprefix(shown)
            assert seen == shown + held
            assert held == "" or any(s.startswith(held) for s in stops)


@given(STOPS, st.text("abcé", max_size=30))
def test_the_check_and_the_text_stop_at_the_same_token(stops: list[str], text: str) -> None:
    check = StopStringCheck(toy_tokenizer(), stops)
    assembler = OutputAssembler(toy_tokenizer(), stop=stops, split=True)
    shown = ""
    for token_id in byte_ids(text):
        matched = check(token_id)
        shown += "".join(chunk.text for chunk in assembler.push([token_id]))
        assert assembler.matched_stop == matched
        if matched is not None:
            break
    shown += "".join(chunk.text for chunk in assembler.finish())
    expected = first_stop(text, stops)
    assert shown == (text[: expected[1]] if expected else text)


def test_many_long_stop_strings_cost_no_more_per_character() -> None:
    """The worst that a request may ask for, on text made to look like every one of them."""
    stop = StopStrings(["a" * 255 + chr(0x100 + i) for i in range(16)])
    start = time.perf_counter()
    for _ in range(20_000):
        stop.push("aaaa")
    assert time.perf_counter() - start < 2  # 80,000 characters; quadratic would take minutes
