"""What is known about the requests of a random life, and what must become of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from qwen3_asgi.errors import ContextLengthExceeded, GenerationTimeout, InvalidRequest
from tests.scheduler.harness import Record

if TYPE_CHECKING:
    from collections.abc import Sequence

    from qwen3_asgi.scheduler.events import Event, Finish

EOS = 0


class Digits:
    """One drawn number, read as several small choices: drawing is what costs the time."""

    def __init__(self, number: int) -> None:
        self.rest = number

    def below(self, limit: int) -> int:
        self.rest, digit = divmod(self.rest, limit)
        return digit


@dataclass
class Fate:
    """What is known about one submitted request, and what must become of it."""

    tokens: list[int]
    fits: bool
    seen: int = 0
    ends: list[Finish] = field(default_factory=list)
    cancelled: bool = False
    failed: bool = False
    seed: int | None = 0  # of its adapter; None: there is no such adapter
    deadline: float | None = None


class Injected(Exception):
    """The only error that the machine's executor and sink raise on purpose."""


class FlakySink(Record):
    """Takes the events, and then fails if it was told to."""

    fails = False

    def deliver(self, events: Sequence[Event]) -> None:
        self.events.extend(events)
        if self.fails:
            self.fails = False
            raise Injected("the listener is dead")


def check_end(fate: Fate, end: Finish) -> None:
    """The reason fits what happened to the request."""
    assert end.completion_tokens == fate.seen
    match end.reason:
        case "abort":
            assert fate.cancelled
        case "error" if not fate.fits:
            assert isinstance(end.error, ContextLengthExceeded)
        case "error" if isinstance(end.error, GenerationTimeout):
            assert fate.deadline is not None
        case "error" if fate.seed is None:
            assert isinstance(end.error, InvalidRequest)
        case "error":
            assert fate.failed, f"failed by itself: {end.error}"
            assert "njected" in str(end.error)
        case _:
            assert fate.fits
            assert fate.seen == len(fate.tokens), "ended early"
            assert end.reason == ("stop" if fate.tokens[-1] == EOS else "length")
