"""Stop strings over a stream of text, character by character, so chunking changes nothing.

The scheduler runs a `StopStringCheck` per token to end the request; the text assembly runs the
same `StopStrings` over the same text to cut it. So both stop at the same token.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from qwen3_asgi.text.detokenize import Detokenizer

if TYPE_CHECKING:
    from collections.abc import Iterable

    from qwen3_asgi.text.tokenizer import Tokenizer


class StopStrings:
    """Lets text through up to the first stop string; holds back only what may still become one.

    The stop string that is complete first wins; of several complete at the same character, the
    longest. An Aho-Corasick automaton: a character costs the same however many and however long
    the stop strings are, and the state's depth is exactly what must be held back.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self._children: list[dict[str, int]] = [{}]
        self._depth = [0]
        self._match: list[str | None] = [None]
        self._fallback = [0]
        for stop in stops:
            self._add(stop)
        self._link()
        self._state = 0
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Return the text that is now certain to be visible; nothing after a match."""
        if self.matched is not None:
            return ""
        pending = self._held + text
        # Nodes are numbered so that a root state needs no walk: most text never leaves it.
        state = self._state
        for i in range(len(self._held), len(pending)):
            char = pending[i]
            while state and char not in self._children[state]:
                state = self._fallback[state]
            state = self._children[state].get(char, 0)
            match = self._match[state]
            if match is not None:
                self.matched = match
                self._held = ""
                return pending[: i + 1 - len(match)]
        self._state = state
        visible = len(pending) - self._depth[state]
        self._held = pending[visible:]
        return pending[:visible]

    def flush(self) -> str:
        """Return what was held back, at the end of the output."""
        held, self._held, self._state = self._held, "", 0
        return held

    def _add(self, stop: str) -> None:
        if not stop:
            raise ValueError("a stop string must not be empty")
        state = 0
        for char in stop:
            children = self._children[state]
            if char not in children:
                children[char] = len(self._children)
                self._children.append({})
                self._depth.append(self._depth[state] + 1)
                self._match.append(None)
                self._fallback.append(0)
            state = children[char]
        self._match[state] = stop

    def _link(self) -> None:
        """Point every node at its longest proper suffix that is also a node."""
        queue = deque(self._children[0].values())
        while queue:
            node = queue.popleft()
            for char, child in self._children[node].items():
                suffix = self._fallback[node]
                while suffix and char not in self._children[suffix]:
                    suffix = self._fallback[suffix]
                self._fallback[child] = self._children[suffix].get(char, 0)
                queue.append(child)
            if self._match[node] is None:
                self._match[node] = self._match[self._fallback[node]]


class StopStringCheck:
    """Called with each token of one request; returns the stop string it completes, or None."""

    def __init__(self, tokenizer: Tokenizer, stops: Iterable[str]) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._stops = StopStrings(stops)

    def __call__(self, token_id: int) -> str | None:
        self._stops.push(self._detokenizer.push(token_id))
        return self._stops.matched
