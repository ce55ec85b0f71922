"""Greedy answers to the held-out items with transformers, and the share of right ones."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedTokenizerBase

    from .heldout import Item
    from .sample import Json

_CALL = re.compile(r"<tool_call>\n(.*?)\n</tool_call>", re.DOTALL)
LONGEST_TOKENS = 320
"""Enough to count to sixty."""


class Answer(NamedTuple):
    text: str
    reasoning: str
    tool_calls: list[tuple[str, Json]]


def parse_answer(raw: str) -> Answer:
    """Splits what the model wrote; a call that isn't JSON counts as text."""
    reasoning, found, rest = raw.rpartition("</think>")
    text = rest if found else raw
    calls: list[tuple[str, Json]] = []
    try:
        for body in _CALL.findall(text):
            call = json.loads(body)
            calls.append((call["name"], call["arguments"]))
    except (ValueError, KeyError, TypeError):
        return Answer(text.strip(), reasoning.strip(), [])
    return Answer(_CALL.sub("", text).strip(), reasoning.replace("<think>", "").strip(), calls)


def answer(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    item: Item,
    longest_tokens: int = LONGEST_TOKENS,
) -> Answer:
    messages: Any = list(item.messages)
    prompt = tokenizer.apply_chat_template(
        messages,
        tools=list(item.tools) or None,
        add_generation_prompt=True,
        enable_thinking=item.enable_thinking,
        tokenize=False,
    )
    encoded = tokenizer(str(prompt), return_tensors="pt", add_special_tokens=False)
    with torch.inference_mode():
        ids = model.generate(
            **encoded,
            do_sample=False,
            temperature=None,
            top_p=None,
            top_k=None,
            max_new_tokens=longest_tokens,
        )
    width = encoded["input_ids"].shape[1]
    return parse_answer(str(tokenizer.decode(ids[0, width:], skip_special_tokens=True)))


class Score(NamedTuple):
    right: int
    asked: int


def score(
    model: Any, tokenizer: PreTrainedTokenizerBase, items: Sequence[Item]
) -> tuple[dict[str, Score], list[tuple[Item, Answer]]]:
    """Right answers per category, and the items that went wrong with what was said."""
    right: dict[str, int] = defaultdict(int)
    asked: dict[str, int] = defaultdict(int)
    wrong: list[tuple[Item, Answer]] = []
    for item in items:
        given = answer(model, tokenizer, item)
        asked[item.category] += 1
        if item.check(given.text, given.tool_calls):
            right[item.category] += 1
        else:
            wrong.append((item, given))
    return {name: Score(right[name], asked[name]) for name in asked}, wrong
