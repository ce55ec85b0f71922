"""Samples to token ids and to the positions that the loss counts, through the real template."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from .sample import Dialogue, Sample

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedTokenizerBase


class Example(NamedTuple):
    ids: list[int]
    learned: list[bool]
    """Whether the token at this place is a target of the loss."""


class Rendering:
    """Owns the id sequences that open an assistant turn."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._header = self._ids(["<|im_start|>assistant\n"])[0]
        self._no_thoughts = self._ids(["<think>\n\n</think>\n\n"])[0]
        self._end = self._ids(["<|im_end|>"])[0][0]
        self._stop = self._ids(["<|endoftext|>"])[0][0]

    def _ids(self, texts: list[str]) -> list[list[int]]:
        encoded = self._tokenizer(texts, add_special_tokens=False)["input_ids"]
        return [list(ids) for ids in encoded]

    def text(self, sample: Sample) -> str:
        if not isinstance(sample, Dialogue):
            return sample.text
        messages: Any = list(sample.messages)
        rendered = self._tokenizer.apply_chat_template(
            messages, tools=list(sample.tools) or None, tokenize=False
        )
        return str(rendered).removesuffix("\n")

    def examples(self, samples: Sequence[Sample]) -> list[Example]:
        encoded = self._ids([self.text(sample) for sample in samples])
        return [
            self._dialogue(ids, sample.enable_thinking)
            if isinstance(sample, Dialogue)
            else Example([*ids, self._stop], [True] * (len(ids) + 1))
            for ids, sample in zip(encoded, samples, strict=True)
        ]

    def _dialogue(self, ids: list[int], thinking: bool) -> Example:
        """Answers count. Not so the first token of an earlier answer: it had no think block."""
        learned = [False] * len(ids)
        width = len(self._header)
        starts = [i + width for i in range(len(ids)) if ids[i : i + width] == self._header]
        for start in starts:
            first = start + 1
            if start == starts[-1]:
                first = start if thinking else start + len(self._no_thoughts)
            for place in range(first, ids.index(self._end, start) + 1):
                learned[place] = True
        return Example(ids, learned)
