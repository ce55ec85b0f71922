"""Keeps control tokens that a message merely spells apart from those the template writes.

Spellings in message text are replaced by marks before rendering; after rendering, whatever control
token is still spelled out is the template's own, and the marks turn back into plain characters.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


class Piece(NamedTuple):
    """A part of a rendered prompt: a control token of the template's, or plain text."""

    text: str
    control: bool


class ControlSpellings:
    """The spellings that a tokenizer turns into one token each.

    `control` tokens (`<|im_start|>` and its like) structure a conversation: no message may write
    them. `tags` (`<think>`, `<tool_call>`) structure a turn: the assistant's own and the
    developer's text may write them, a user's or a tool's may not.
    """

    def __init__(self, control: Sequence[str], tags: Sequence[str]) -> None:
        self._spellings = [*control, *tags]
        self._index = {spelling: i for i, spelling in enumerate(self._spellings)}
        self._control = _any_of(control)
        self._all = _any_of(self._spellings)

    def escape_messages(
        self, messages: Sequence[Mapping[str, Any]], marks: Marks
    ) -> list[dict[str, Any]]:
        """Escape every string of normalised messages except their role."""
        result: list[dict[str, Any]] = []
        for message in messages:
            role = message["role"]
            escaped = {
                key: value if key in ("role", "content") else self.escape(value, marks)
                for key, value in message.items()
            }
            may_write_tags = role in ("assistant", "system")
            escaped["content"] = self.escape(message["content"], marks, tags=not may_write_tags)
            result.append(escaped)
        return result

    def escape(self, value: Any, marks: Marks, *, tags: bool = True) -> Any:
        """Return the JSON value with all spellings in its strings (keys too) marked."""
        if isinstance(value, str):
            pattern = self._all if tags else self._control
            return pattern.sub(lambda match: marks.mark(self._index[match[0]]), value)
        if isinstance(value, Mapping):
            return {
                self.escape(key, marks, tags=tags): self.escape(item, marks, tags=tags)
                for key, item in value.items()
            }
        if isinstance(value, (list, tuple)):
            return [self.escape(item, marks, tags=tags) for item in value]
        return value

    def split(self, rendered: str, marks: Marks) -> list[Piece]:
        """Cut a rendered prompt into the template's control tokens and plain text."""
        pieces: list[Piece] = []
        start = 0
        for match in self._all.finditer(rendered):
            if match.start() > start:
                pieces.append(Piece(self._restore(rendered[start : match.start()], marks), False))
            pieces.append(Piece(match[0], True))
            start = match.end()
        if start < len(rendered):
            pieces.append(Piece(self._restore(rendered[start:], marks), False))
        return pieces

    def _restore(self, text: str, marks: Marks) -> str:
        return marks.pattern.sub(lambda match: self._spellings[int(match[1])], text)


class Marks:
    """The marks of one prompt. A random name makes them impossible to write into a message."""

    def __init__(self) -> None:
        # Private-use characters: no template strips or tests for them, JSON leaves them alone.
        self._opening = f"\ue0f0{secrets.token_hex(8)}\ue0f2"
        self.pattern = re.compile(f"{self._opening}([0-9]+)\ue0f1")
        self.used = False

    def mark(self, index: int) -> str:
        self.used = True
        return f"{self._opening}{index}\ue0f1"


def _any_of(spellings: Sequence[str]) -> re.Pattern[str]:
    # Longest first, as the tokenizer matches. `(?!)` never matches: an empty alternation would.
    longest_first = sorted(spellings, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
