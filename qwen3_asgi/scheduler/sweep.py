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
    from collections.abc import Collection, Mapping

    from qwen3_asgi.scheduler.plan import RequestId
    from qwen3_asgi.scheduler.request import Request


@dataclass(frozen=True, slots=True)
class Sweep:
    """`due` are dropped in this iteration; `carried` are looked at again in the next."""

    due: tuple[tuple[Request, Cancelled], ...]
    carried: Mapping[RequestId, Cancelled]


def collect(
    arrived: Collection[Cancelled], carried: Mapping[RequestId, Cancelled], queues: QueueTable
) -> Sweep:
    """Sort the cancels: due, carried (in flight, or overtaking its own submit), or too late.

    A cancel may be read one iteration before the submit it belongs to, since commands are drained
    first; so an unknown id is carried once. Still unknown then, it has finished long ago.
    Costs in proportion to what was cancelled, not to what is live.
    """
    due: dict[RequestId, tuple[Request, Cancelled]] = {}
    keep: dict[RequestId, Cancelled] = {}
    forks: list[Cancelled] = []  # they go with their parents; grows as it is looked through
    get = queues.get
    for entries in (carried.values(), arrived, forks):
        for entry in entries:
            request_id = entry.request_id
            if request_id in due or request_id in keep:
                continue
            request = get(request_id)
            if request is None:
                if entries is arrived:
                    keep[request_id] = entry
                continue
            if request.state in SWEPT_STATES:
                due[request_id] = (request, entry)
            else:
                keep[request_id] = entry
            if request.forks:
                forks += [
                    Cancelled(fork.id, fork.forwarded_tokens, entry.error)
                    for fork in request.forks
                    if fork.state is not None
                ]
    return Sweep(tuple(due.values()), keep)
