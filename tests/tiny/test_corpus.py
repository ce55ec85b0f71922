"""The generated text is reproducible and holds none of the held-out questions."""

from __future__ import annotations

import json
import re
import string
from itertools import islice

import pytest

from qwen3_asgi.tiny import tiny_path
from qwen3_asgi.tiny.corpus import samples
from qwen3_asgi.tiny.facts import RELATIONS
from qwen3_asgi.tiny.heldout import Item, ToolCall, heldout_items
from qwen3_asgi.tiny.sample import Dialogue, normalised, user_texts
from qwen3_asgi.tiny.words import UNSEEN_CITIES, UNSEEN_NAMES, UNSEEN_WORDS


def test_the_same_seed_gives_the_same_samples() -> None:
    assert list(islice(samples(5), 300)) == list(islice(samples(5), 300))
    assert list(islice(samples(5), 300)) != list(islice(samples(6), 300))


def test_no_held_out_question_occurs_in_the_training_text() -> None:
    record = json.loads((tiny_path() / "training.json").read_text(encoding="utf-8"))
    held_out = {normalised(text) for item in heldout_items() for text in item.held_out_texts}
    for sample in islice(samples(record["seed"]), record["samples"]):
        if isinstance(sample, Dialogue):
            assert held_out.isdisjoint(map(normalised, user_texts(sample)))


def test_held_out_names_cities_and_words_are_new_to_the_model() -> None:
    reserved = {*UNSEEN_NAMES, *UNSEEN_CITIES, *UNSEEN_WORDS}
    for sample in islice(samples(1), 20_000):
        if isinstance(sample, Dialogue):
            for text in user_texts(sample):
                assert reserved.isdisjoint(re.findall(r"\w+", text))


def test_there_are_enough_held_out_items_and_no_two_are_the_same() -> None:
    items = heldout_items()
    assert len(items) >= 300
    assert items == heldout_items()
    asked = [(item.messages, item.tools, item.enable_thinking) for item in items]
    assert all(asked.count(one) == 1 for one in asked)


@pytest.mark.parametrize("relation", RELATIONS, ids=lambda relation: relation.name)
def test_frames_name_their_fields_and_held_out_ones_are_not_trained(relation: object) -> None:
    assert relation in RELATIONS
    for known in RELATIONS:
        if known is not relation:
            continue
        frames = (*known.nouns, *known.clauses, *known.questions, *known.unseen)
        fields = {name for frame in frames for _, name, _, _ in string.Formatter().parse(frame)}
        assert fields <= {None, "x", "ax", "X", "AX"}
        assert set(known.unseen).isdisjoint(known.questions)


def test_a_check_wants_the_word_and_no_competing_one() -> None:
    item = Item("facts", ({"role": "user", "content": "?"},), "Rome", competing=("Paris",))
    assert item.check("The capital of Italy is Rome.")
    assert item.check("rome")
    assert not item.check("Romeo")
    assert not item.check("Rome or Paris")
    assert not item.check("Rome", [("get_capital", {})])


def test_a_check_of_a_call_compares_name_and_arguments() -> None:
    item = Item("tool call", (), "", "call", call=ToolCall("clock", {"city": "Oslo"}))
    assert item.check("", [("clock", {"city": "Oslo"})])
    assert not item.check("", [("clock", {"town": "Oslo"})])
    assert not item.check("clock", [])
