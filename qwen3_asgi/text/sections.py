"""Cuts generated tokens into sections - content, reasoning, tool call - by token id, not by text.

A tag is recognised only as the one token the model was trained to emit; the same characters
spelled in several tokens are text. `OutputAssembler` is the caller.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

from qwen3_asgi.text.detokenize import Detokenizer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from qwen3_asgi.text.tokenizer import Tokenizer

Section = Literal["content", "reasoning", "tool_call"]


class Piece(NamedTuple):
    """Raw text of a section, or (`is_tag`) the text of the tag that opens `section`."""

    section: Section
    text: str
    is_tag: bool = False


def starts_in_reasoning(prompt_ids: Sequence[int], tokenizer: Tokenizer) -> bool:
    """Whether the output continues a think block that the prompt has opened.

    True if the last `<think>` stands after the last `<|im_start|>` and is not closed.
    """
    for token_id in reversed(prompt_ids):
        if token_id == tokenizer.think_start_id:
            return True
        if token_id in (tokenizer.think_end_id, tokenizer.im_start_id):
            return False
    return False


class Segmenter:
    """Turns tokens into pieces whose concatenated text is the detokenised output, tags included.

    `reasoning` and `tool_calls` say which tags are looked for; others stay text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        reasoning: bool,
        tool_calls: bool,
        start_in_reasoning: bool = False,
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self.section: Section = "reasoning" if reasoning and start_in_reasoning else "content"
        self.reasoning_tokens = 0
        transitions: list[tuple[Section, int | None, Section]] = []
        if reasoning:
            transitions.append(("content", tokenizer.think_start_id, "reasoning"))
            transitions.append(("reasoning", tokenizer.think_end_id, "content"))
        if tool_calls:
            transitions.append(("content", tokenizer.tool_call_start_id, "tool_call"))
            transitions.append(("tool_call", tokenizer.tool_call_end_id, "content"))
        self._next: dict[tuple[Section, int], Section] = {
            (section, token_id): after
            for section, token_id, after in transitions
            if token_id is not None
        }

    def push(self, token_id: int) -> list[Piece]:
        after = self._next.get((self.section, token_id))
        if after is None:
            if self.section == "reasoning":
                self.reasoning_tokens += 1
            text = self._detokenizer.push(token_id)
            return [Piece(self.section, text)] if text else []
        # A character left unfinished belongs to the section before the tag.
        pieces = self.flush()
        pieces.append(Piece(after, self._detokenizer.push(token_id), is_tag=True))
        self.section = after
        return pieces

    def flush(self) -> list[Piece]:
        text = self._detokenizer.flush()
        return [Piece(self.section, text)] if text else []
