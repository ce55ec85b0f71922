"""Streamed text equals decoded text, character by whole character."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from qwen3_asgi.text.detokenize import Detokenizer
from tests.text.toy import byte_ids, token, toy_backend, toy_tokenizer


def streamed(ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(toy_tokenizer())
    return [*(detokenizer.push(i) for i in ids), detokenizer.flush()]


def test_a_character_appears_with_its_last_byte() -> None:
    assert streamed(byte_ids("é€")) == ["", "é", "", "", "€", ""]


def test_special_tokens_have_no_text_and_tags_have() -> None:
    assert streamed([token("<|im_end|>"), token("<think>")]) == ["", "<think>", ""]


def test_an_unfinished_character_shows_at_the_end() -> None:
    assert streamed(byte_ids("€")[:2]) == ["", "", "�"]


def test_a_literal_replacement_character_is_not_held_back() -> None:
    assert streamed(byte_ids("�a")) == ["", "", "�", "a", ""]


@given(st.text())
def test_any_text_comes_back_from_single_bytes(text: str) -> None:
    pieces = streamed(byte_ids(text))
    assert "".join(pieces) == text
    assert pieces[-1] == ""


@given(st.lists(st.text(max_size=8), max_size=8))
def test_any_text_comes_back_from_any_split_into_tokens(parts: list[str]) -> None:
    ids = [i for part in parts for i in toy_tokenizer().encode(part)]
    if not any(i >= 262 for i in ids):
        assert "".join(streamed(ids)) == "".join(parts)


@given(st.lists(st.integers(0, 270)))
def test_any_tokens_stream_to_what_they_decode_to(ids: list[int]) -> None:
    assert "".join(streamed(ids)) == toy_backend().decode(ids)
