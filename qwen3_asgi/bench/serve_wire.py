"""One streamed answer of an OpenAI-compatible server, fed bytes as they come: who said what, when.

No HTTP library: with hundreds of streams its cost in the client would be part of what is measured.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

MAX_HEAD_BYTES = 65536
# Fields of a choice, or of its delta, that carry generated text.
TEXTS = ("text", "content", "reasoning", "reasoning_content")


class WireError(Exception):
    """The answer is not what it should be; `kind` is what errors are counted by."""

    def __init__(self, kind: str, detail: str = "") -> None:
        super().__init__(f"{kind}: {detail}" if detail else kind)
        self.kind = kind


@dataclass(slots=True)
class Answer:
    """What one request got. Times are of `time.perf_counter`.

    `chunks` has a time and a number of tokens for each event that carried any. The number comes
    from the usage in the event where the server sends it, else it is an even part of the usage at
    the end, else 1; so it may be a fraction. `asked` tokens at most were wanted.
    """

    begin: float
    asked: int
    end: float = 0.0
    error: str = ""
    detail: str = ""
    prompt_tokens: int | None = None
    output_tokens: float = 0.0
    reported: bool = False
    chunks: list[tuple[float, float]] = field(default_factory=list)

    @property
    def ttft(self) -> float:
        return self.chunks[0][0] - self.begin

    def gaps(self) -> list[float]:
        """Seconds between tokens: n tokens that come at once share the wait for them."""
        found: list[float] = []
        before = self.chunks[0][0]
        for at, tokens in self.chunks[1:]:
            count = max(1, round(tokens))
            found += [(at - before) / count] * count
            before = at
        return found


class Reader:
    """Reads one HTTP/1.1 answer with server-sent events into an `Answer`."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self._raw = b""
        self._text = b""
        self._status = 0
        self._chunked = False
        self._left: int | None = None  # of the current chunk, once its size is known
        self._done = False
        self._finished = False
        self._seen = 0  # tokens, by the usage in the events
        self._usage: int | None = None

    def feed(self, data: bytes, now: float) -> bool:
        """Take what came; true when the answer is complete.

        Raises:
            WireError: it is an error, or no answer at all.
        """
        self._raw += data
        if not self._status and not self._head():
            return False
        if self._status != 200:
            return False  # the body says why; `close` raises it
        self._body()
        while not self._done and (found := self._event()) is not None:
            if found:
                self._take(found, now)
        return self._done

    def close(self, now: float) -> None:
        """The server closed, or `feed` was complete.

        Raises:
            WireError: too early.
        """
        answer = self.answer
        if not self._status:
            raise WireError("dropped", "closed before an answer")
        if self._status != 200:
            self._body()
            body = (self._text or self._raw).decode(errors="replace").strip()
            raise WireError(f"http {self._status}", body[:200])
        if not (self._done or self._finished):
            raise WireError("dropped", f"closed after {len(answer.chunks)} events with text")
        if not answer.chunks:
            raise WireError("empty", "the answer has no token")
        answer.end = now
        self._count()

    def _count(self) -> None:
        answer = self.answer
        chunks = sum(tokens or 1 for _, tokens in answer.chunks)
        if self._usage is None:
            answer.chunks = [(at, tokens or 1.0) for at, tokens in answer.chunks]
            answer.output_tokens = chunks
            return
        if not 0 < self._usage <= answer.asked:
            raise WireError(
                "wrong usage", f"{self._usage} tokens reported, at most {answer.asked} asked"
            )
        answer.reported, answer.output_tokens = True, float(self._usage)
        if not self._seen:
            each = self._usage / len(answer.chunks)
            answer.chunks = [(at, each) for at, _ in answer.chunks]

    def _head(self) -> bool:
        end = self._raw.find(b"\r\n\r\n")
        if end < 0:
            if len(self._raw) > MAX_HEAD_BYTES or (
                self._raw and not b"HTTP/".startswith(self._raw[:5])
            ):
                raise WireError("malformed", f"no HTTP: {self._raw[:60]!r}")
            return False
        first, *headers = self._raw[:end].decode("latin-1").split("\r\n")
        parts = first.split(" ", 2)
        if not parts[0].startswith("HTTP/1.") or len(parts) < 2 or not parts[1].isdecimal():
            raise WireError("malformed", f"no HTTP: {first[:60]!r}")
        self._status = int(parts[1])
        self._chunked = any(
            line.lower().replace(" ", "") == "transfer-encoding:chunked" for line in headers
        )
        self._raw = self._raw[end + 4 :]
        return True

    def _body(self) -> None:
        """Move what is body from `_raw` to `_text`."""
        if not self._chunked:
            self._text += self._raw
            self._raw = b""
            return
        while self._raw:
            if self._left is None:
                size, found, rest = self._raw.partition(b"\r\n")
                if not found:
                    return
                try:
                    self._left = int(size.split(b";")[0], 16) + 2  # with the line's end behind it
                except ValueError:
                    raise WireError("malformed", f"chunk size {size[:40]!r}") from None
                self._raw = rest
            part, self._raw = self._raw[: self._left], self._raw[self._left :]
            # The last two bytes of a chunk are no text, wherever `part` ends.
            self._text += part[: max(0, self._left - 2)]
            self._left -= len(part)
            if self._left == 0:
                self._left = None

    def _event(self) -> bytes | None:
        """The next line of the event stream without its end; None: there is none yet."""
        line, found, rest = self._text.partition(b"\n")
        if not found:
            return None
        self._text = rest
        return line.strip()

    def _take(self, line: bytes, now: float) -> None:
        if not line.startswith(b"data:"):
            if line.startswith((b":", b"event:", b"id:", b"retry:")):
                return
            raise WireError("malformed", f"no event stream: {line[:60]!r}")
        data = line[5:].strip()
        if data == b"[DONE]":
            self._done = True
            return
        try:
            event = json.loads(data)
            choices = event.get("choices") or []
            usage = event.get("usage") or {}
            if "error" in event:
                raise WireError("error event", str(event["error"])[:200])
            if any(choice.get("finish_reason") for choice in choices):
                self._finished = True
            self._note(now, any(_says(choice) for choice in choices), usage, bool(choices))
        except (ValueError, AttributeError, TypeError) as error:
            raise WireError("malformed", f"{error}: {data[:60]!r}") from None

    def _note(self, now: float, says: bool, usage: dict[str, Any], in_chunk: bool) -> None:
        count, tokens, grows = usage.get("completion_tokens"), 0, False
        if count is not None:
            self._usage = int(count)
            self.answer.prompt_tokens = int(usage.get("prompt_tokens") or 0) or None
            # Some servers put the usage of the whole answer into the last event with a choice: that
            # event did not bring all the tokens.
            grows = in_chunk and (self._seen > 0 or not self.answer.chunks)
            if grows:
                tokens, self._seen = max(0, self._usage - self._seen), max(self._seen, self._usage)
        if tokens or (says and not grows):
            self.answer.chunks.append((now, float(tokens)))


def _says(choice: dict[str, Any]) -> bool:
    delta = choice.get("delta") or {}
    return any(choice.get(name) or delta.get(name) for name in TEXTS)
