"""What the scheduler and the delivery add to a step, without the step: see `bench.step`."""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING

import anyio

from qwen3_asgi.bench.loops import run_on
from qwen3_asgi.bench.scheduler import BLOCK_SIZE, NullExecutor
from qwen3_asgi.bench.world import frozen
from qwen3_asgi.engine.delivery import Delivery
from qwen3_asgi.engine.mailbox import Mailbox
from qwen3_asgi.metrics import EngineMetrics
from qwen3_asgi.scheduler.loop import Scheduler
from qwen3_asgi.scheduler.plan import RequestId
from qwen3_asgi.scheduler.request import Request

if TYPE_CHECKING:
    from collections.abc import Sequence

    from qwen3_asgi.scheduler.events import Event

WARM_UP, ITERATIONS = 8, 60


class TimedSink:
    """Hands on to the delivery, and sums the time that takes on the scheduler's thread."""

    def __init__(self, delivery: Delivery) -> None:
        self.seconds = 0.0
        self._delivery = delivery

    def deliver(self, events: Sequence[Event]) -> None:
        begin = time.perf_counter()
        self._delivery.deliver(events)
        self.seconds += time.perf_counter() - begin


def scheduling_seconds(batch: int, context: int) -> tuple[float, float]:
    """Median seconds per step of the scheduler's own work and of the delivery, with `batch`
    requests that have `context` tokens each, metrics included."""
    found: list[tuple[float, float]] = []

    async def main() -> None:
        delivery = Delivery(_ignore)
        outbox = delivery.outbox_here()
        requests = [Request(f"r{i}", [1 + i] * context) for i in range(batch)]
        for request in requests:
            delivery.register(Mailbox(RequestId(request.id), outbox, _ignore, _ignore))
        each = (context + WARM_UP + ITERATIONS) // BLOCK_SIZE + 3
        sink = TimedSink(delivery)
        scheduler = Scheduler(
            NullExecutor(batch * each, [request.id for request in requests]),
            sink,
            max_batch=batch,
            max_prefill_tokens=batch * context,
            observer=EngineMetrics("null", "0"),
        )
        scheduler.submit(*requests)
        for _ in range(WARM_UP):
            scheduler.iterate()
        if scheduler.load.num_running != batch:
            raise RuntimeError(f"not every request decodes: {scheduler.load}")
        with frozen():
            for _ in range(ITERATIONS):
                sink.seconds = 0.0
                begin = time.perf_counter()
                scheduler.iterate()
                whole = time.perf_counter() - begin
                found.append((whole - sink.seconds, sink.seconds))
                # The loop takes what it was woken for, as it would during a step.
                await anyio.lowlevel.checkpoint()

    run_on("asyncio", main)
    own, delivered = zip(*found, strict=True)
    return statistics.median(own), statistics.median(delivered)


def _ignore(value: object) -> None:
    del value
