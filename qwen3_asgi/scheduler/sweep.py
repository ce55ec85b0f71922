"""Which cancelled requests leave now. The ids are collected once; exactly these are dropped.

A request that is cancelled after the collection is left alone until the next sweep: dropping by
re-reading a flag could take it out of its queue without releasing what it holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from qwen3_asgi.scheduler.inbox import Cancelled
from qwen3_asgi.scheduler.queues import SWEPT_STATES, QueueTable

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from qwen3_asgi.scheduler.plan import RequestId
    from qwen3_asgi.scheduler.request import Request


@dataclass(frozen=True, slots=True)
class Sweep:
    """`due` are dropped in this iteration; `carried` are looked at again in the next."""

    due: tuple[tuple[Request, Cancelled], ...]
    carried: Mapping[RequestId, Cancelled]


def collect(
    arrived: Iterable[Cancelled], carried: Mapping[RequestId, Cancelled], queues: QueueTable
) -> Sweep:
    """Sort the cancels: due, carried (in flight, or overtaking its own submit), or too late.

    A cancel may be read one iteration before the submit it belongs to, since commands are drained
    first; so an unknown id is carried once. Still unknown then, it has finished long ago.
    Costs in proportion to what was cancelled, not to what is live.
    """
    entries = dict(carried)
    fresh: set[RequestId] = set()
    for entry in arrived:
        entries.setdefault(entry.request_id, entry)
        fresh.add(entry.request_id)
    due: list[tuple[Request, Cancelled]] = []
    keep: dict[RequestId, Cancelled] = {}
    look = list(entries.items())
    for request_id, entry in look:
        request = queues.get(request_id)
        if request is None:
            if request_id in fresh:
                keep[request_id] = entry
            continue
        if request.state in SWEPT_STATES:
            due.append((request, entry))
        else:
            keep[request_id] = entry
        if request.forks:  # they go with it
            look += [
                (fork.id, Cancelled(fork.id, fork.forwarded_tokens, entry.error))
                for fork in request.forks
                if fork.state is not None and fork.id not in entries
            ]
    return Sweep(tuple(due), keep)
