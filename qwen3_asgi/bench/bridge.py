"""From the scheduler's thread to readers on an event loop: token events per second, and wake-ups.

The bridge alone: real mailboxes, handles and delivery, and a thread in the scheduler's place that
delivers one token per reader and step. On one core, as far as the system lets us choose.

"in step": the next step is delivered when every reader has read the last one, so that each token
wakes its reader; the dearest case. "free": steps come as fast as they can be delivered, and a
reader gets what has gathered since its last read.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Literal, get_args

import anyio

from qwen3_asgi.bench.figures import Spread, columns
from qwen3_asgi.bench.loops import LoopName, run_on
from qwen3_asgi.engine.delivery import Delivery
from qwen3_asgi.engine.handle import RequestHandle
from qwen3_asgi.engine.mailbox import Mailbox
from qwen3_asgi.scheduler.events import Event, Finish
from qwen3_asgi.scheduler.plan import RequestId, SampledToken

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

Pace = Literal["in step", "free"]
PACES: tuple[Pace, ...] = get_args(Pace)


@dataclass(frozen=True, slots=True)
class BridgeOptions:
    """`rounds` times `steps` steps for `readers` readers, per loop and pace."""

    loops: tuple[LoopName, ...] = ("asyncio",)
    readers: int = 256
    steps: int = 100
    rounds: int = 7


@dataclass(frozen=True, slots=True)
class BridgeReport:
    """Figures of the rounds. CPU is that of the whole process: the delivering thread and the loop.

    `wakeups_per_step` is the most that any round needed.
    """

    loop: LoopName
    pace: Pace
    readers: int
    events_per_second: Spread
    cpu_us_per_event: Spread
    wakeups_per_step: float
    reads_per_event: float


def run_bridge(options: BridgeOptions) -> list[BridgeReport]:
    """One report per loop and pace."""
    with one_core():
        return [_measure(loop, pace, options) for loop in options.loops for pace in PACES]


def to_json(reports: list[BridgeReport]) -> str:
    return json.dumps({"rows": [asdict(report) for report in reports]})


def table(reports: list[BridgeReport]) -> str:
    """The reports as lines for a person."""
    rows = [
        ["token events", "per second", "p10", "p90", "CPU µs each", "wake-ups/step", "reads/event"]
    ]
    for report in reports:
        rate, cpu = report.events_per_second, report.cpu_us_per_event
        rows.append(
            [
                f"{report.loop}, {report.readers} readers, {report.pace}",
                f"{rate.median:,.0f}",
                f"{rate.p10:,.0f}",
                f"{rate.p90:,.0f}",
                f"{cpu.median:.2f}",
                f"{report.wakeups_per_step:.2f}",
                f"{report.reads_per_event:.2f}",
            ]
        )
    return columns(rows)


@contextlib.contextmanager
def one_core() -> Iterator[None]:
    """This thread, and those that it starts, on one core only."""
    if not hasattr(os, "sched_setaffinity"):  # not every system has it
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _measure(loop: LoopName, pace: Pace, options: BridgeOptions) -> BridgeReport:
    run_on(loop, _Round(pace, options.readers, max(2, options.steps // 10)).run)  # warm up
    rounds = [_Round(pace, options.readers, options.steps) for _ in range(options.rounds)]
    for each in rounds:
        run_on(loop, each.run)
    events = options.readers * options.steps
    return BridgeReport(
        loop,
        pace,
        options.readers,
        events_per_second=Spread.of(events / each.seconds for each in rounds),
        cpu_us_per_event=Spread.of(each.cpu_seconds / events * 1e6 for each in rounds),
        wakeups_per_step=max(each.wakeups for each in rounds) / options.steps,
        reads_per_event=sum(each.reads for each in rounds) / events / len(rounds),
    )


class _Round:
    """One run of `steps` steps. `run` on the loop, `_deliver` on the thread."""

    def __init__(self, pace: Pace, readers: int, steps: int) -> None:
        self.seconds = self.cpu_seconds = 0.0
        self.wakeups = self.reads = 0
        self._readers = readers
        self._steps = steps
        self._delivery = Delivery(self._count_wakeups)
        self._received = 0
        # Lets the thread go on; only taken when in step.
        self._all_read = threading.Semaphore(0) if pace == "in step" else None

    async def run(self) -> None:
        """
        Raises:
            RuntimeError: a token was lost.
        """
        outbox = self._delivery.outbox_here()
        mailboxes = []
        for i in range(self._readers):
            mailbox = Mailbox(RequestId(f"r{i}"), outbox, _ignore, _ignore)
            self._delivery.register(mailbox)
            mailboxes.append(mailbox)
        token = SampledToken(1)
        step = [Event(mailbox.request_id, token, None) for mailbox in mailboxes]
        end = Finish("length", 1, 0, self._steps)
        last = [Event(mailbox.request_id, token, end) for mailbox in mailboxes]
        thread = threading.Thread(target=self._deliver, args=(step, last), name="bench bridge")
        async with anyio.create_task_group() as group:
            for mailbox in mailboxes:
                group.start_soon(self._read, RequestHandle([mailbox], [1], None))
            await anyio.wait_all_tasks_blocked()
            begin, cpu = time.perf_counter(), time.process_time()
            thread.start()
        self.seconds, self.cpu_seconds = time.perf_counter() - begin, time.process_time() - cpu
        thread.join()
        if self._received != self._readers * self._steps:
            raise RuntimeError(f"{self._received} of {self._readers * self._steps} tokens came")

    async def _read(self, handle: RequestHandle) -> None:
        async for batch in handle:
            self.reads += 1
            for _ in batch.tokens:
                self._received += 1
                if self._all_read is not None and self._received % self._readers == 0:
                    self._all_read.release()

    def _deliver(self, step: Sequence[Event], last: Sequence[Event]) -> None:
        for _ in range(self._steps - 1):
            self._delivery.deliver(step)
            if self._all_read is not None:
                self._all_read.acquire()
        self._delivery.deliver(last)

    def _count_wakeups(self, count: int) -> None:
        self.wakeups += count


def _ignore(value: str) -> None:
    del value
