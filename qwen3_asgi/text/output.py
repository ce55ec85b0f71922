"""Assembles what a client sees from generated tokens: sections, stop strings, tidy newlines.

`push` takes the tokens that arrived, `finish` ends the output; both return chunks in order. Stop
strings are matched over the raw text with its tags, exactly as `StopStringCheck` matches them.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from qwen3_asgi.text.sections import Piece, Section, Segmenter, starts_in_reasoning
from qwen3_asgi.text.stop import StopStrings
from qwen3_asgi.text.tool_calls import parse_tool_call

if TYPE_CHECKING:
    from collections.abc import Iterable

    from qwen3_asgi.text.tokenizer import Tokenizer

__all__ = ["Chunk", "OutputAssembler", "Section", "starts_in_reasoning"]


class Chunk(NamedTuple):
    """Visible text of a section. A `tool_call` chunk is one whole call that parses."""

    section: Section
    text: str


class OutputAssembler:
    """One request's output. Emitted text is never taken back.

    With `split=False` everything is content, tags included. With `split=True` think blocks become
    `reasoning` and, unless `tool_calls=False`, tool calls become chunks of their own.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: Iterable[str] = (),
        split: bool = False,
        start_in_reasoning: bool = False,
        tool_calls: bool = True,
    ) -> None:
        self._segmenter = Segmenter(
            tokenizer,
            reasoning=split,
            tool_calls=split and tool_calls,
            start_in_reasoning=start_in_reasoning,
        )
        stops = tuple(stop)
        self._stops = StopStrings(stops) if stops else None
        self._pending: deque[Piece] = deque()
        self._shown = _Presenter(self._segmenter.section)

    @property
    def matched_stop(self) -> str | None:
        return self._stops.matched if self._stops else None

    @property
    def reasoning_tokens(self) -> int:
        return self._segmenter.reasoning_tokens

    def push(self, token_ids: Iterable[int]) -> list[Chunk]:
        """Take tokens; return the text that is now certain."""
        for token_id in token_ids:
            for piece in self._segmenter.push(token_id):
                self._take(piece)
        return self._shown.take_chunks()

    def finish(self) -> list[Chunk]:
        """Return what was held back. The assembler must not be used after."""
        if self.matched_stop is None:
            if self._stops:
                self._release(len(self._stops.flush()))
            # An unfinished character at the end can't end the request any more, so it is shown
            # without asking the stop strings.
            for piece in self._segmenter.flush():
                self._shown.show(piece)
        self._shown.finish()
        return self._shown.take_chunks()

    def _take(self, piece: Piece) -> None:
        if self._stops is None:
            self._shown.show(piece)
        elif self._stops.matched is None:
            self._pending.append(piece)
            self._release(len(self._stops.push(piece.text)))

    def _release(self, num_chars: int) -> None:
        while self._pending:
            piece = self._pending[0]
            if len(piece.text) > num_chars:
                if not piece.is_tag:  # a tag takes effect when its last character is certain
                    self._shown.show(Piece(piece.section, piece.text[:num_chars]))
                self._pending[0] = piece._replace(text=piece.text[num_chars:])
                return
            num_chars -= len(piece.text)
            self._shown.show(self._pending.popleft())


class _Presenter:
    """Drops tags and the newlines around them, and gathers each tool call into one chunk."""

    def __init__(self, section: Section) -> None:
        self._section = section
        self._chunks: list[Chunk] = []
        # Newlines are dropped right after a tag, and held back until text or a tag follows.
        self._after_tag = section == "reasoning"
        self._newlines = 0
        self._call: list[str] = []

    def show(self, piece: Piece) -> None:
        if piece.is_tag:
            self._close(closed=True)
            self._section = piece.section
            self._after_tag = True
        elif self._section == "tool_call":
            self._call.append(piece.text)
        else:
            self._show_text(piece.text)

    def finish(self) -> None:
        if self._section == "content" and not self._after_tag:
            self._emit("\n" * self._newlines)
        self._close(closed=False)

    def take_chunks(self) -> list[Chunk]:
        """Return the chunks since the last call, neighbours of one section joined."""
        taken, self._chunks = self._chunks, []
        merged: list[Chunk] = []
        parts: list[str] = []
        for i, chunk in enumerate(taken):
            parts.append(chunk.text)
            following = taken[i + 1].section if i + 1 < len(taken) else None
            if chunk.section == "tool_call" or chunk.section != following:
                merged.append(Chunk(chunk.section, "".join(parts)))
                parts = []
        return merged

    def _show_text(self, text: str) -> None:
        if self._after_tag:
            text = text.lstrip("\n")
            if not text:
                return
            self._after_tag = False
        body = text.rstrip("\n")
        trailing = len(text) - len(body)
        if body:
            self._emit("\n" * self._newlines + body)
            self._newlines = trailing
        else:
            self._newlines += trailing

    def _close(self, *, closed: bool) -> None:
        if self._section == "tool_call":
            text = "".join(self._call)
            self._call = []
            if parse_tool_call(text) is not None:
                self._chunks.append(Chunk("tool_call", text))
            else:
                end = "</tool_call>" if closed else ""
                self._chunks.append(Chunk("content", f"<tool_call>{text}{end}"))
        self._newlines = 0

    def _emit(self, text: str) -> None:
        if text:
            self._chunks.append(Chunk(self._section, text))
