"""A short life of a scheduler, recorded: clients decode, a long prompt comes, two clients hang up.

One of them is decoding when it leaves, and one has not been admitted yet.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from qwen3_asgi.bench.world import long_model, running

if TYPE_CHECKING:
    from qwen3_asgi.scheduler.trace import Trace

SHORT_PROMPT_TOKENS = 32
SOME_TOKENS = 6


@dataclass(frozen=True, slots=True)
class TimelineOptions:
    clients: int = 4
    prompt_tokens: int = 4096
    chunk_tokens: int = 512
    overlap: bool = False
    device: str = "cpu"


def record(options: TimelineOptions) -> Trace:
    """Play it on the real executor, and return what the scheduler did from the first to the last
    token."""
    names = [f"client {i}" for i in range(1, options.clients + 1)]
    with (
        long_model(device=options.device) as executor,
        running(
            executor,
            overlap=options.overlap,
            chunk_tokens=options.chunk_tokens,
            max_batch=options.clients + 1,
        ) as world,
    ):
        clients = world.clients
        # The first steps of a process are slow: torch sets itself up.
        world.submit("warm-up", options.prompt_tokens, max_tokens=SOME_TOKENS)
        clients.wait_end("warm-up")
        for name in names:
            world.submit(name, SHORT_PROMPT_TOKENS)
        clients.wait_tokens(names, SOME_TOKENS)
        world.submit("long prompt", options.prompt_tokens, max_tokens=2 * SOME_TOKENS)
        world.submit("queued", SHORT_PROMPT_TOKENS)
        leaver, *stay = names
        clients.wait_tokens([leaver], 2)
        world.hang_up("queued")
        clients.wait_tokens([leaver], 2)
        world.hang_up(leaver)
        clients.wait_end("queued", leaver, "long prompt")
        clients.wait_tokens(stay, SOME_TOKENS)
        for name in stay:
            world.hang_up(name)
        clients.wait_end(*stay)
    return without(world.trace.read(), "warm-up")


def without(trace: Trace, name: str) -> Trace:
    """The trace from the iteration after this request's last."""
    last = max(
        place
        for place, each in enumerate(trace.iterations)
        if any(happening.request == name for happening in each.happenings)
    )
    return trace._replace(
        iterations=trace.iterations[last + 1 :],
        marks=tuple(mark for mark in trace.marks if mark.request != name),
    )
