"""A scheduler on a fake executor, driven one iteration at a time, with a record of the outcome.

Nothing here sleeps or starts a thread: tests say `submit`, `cancel`, `step`, and read the record.
"""

from __future__ import annotations

import zlib
from collections import Counter, deque
from concurrent.futures import Future
from itertools import count
from typing import TYPE_CHECKING, Any

from qwen3_asgi.scheduler.control import load_adapter, unload_adapter
from qwen3_asgi.scheduler.lanes import Landed, Lane
from qwen3_asgi.scheduler.loop import Scheduler
from qwen3_asgi.scheduler.plan import StepResult, result_of
from qwen3_asgi.scheduler.request import Request, State
from qwen3_asgi.testing.fake_executor import FakeExecutor, generate
from qwen3_asgi.testing.fake_tiers import FakeTiers

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from qwen3_asgi.scheduler.events import Event, Finish
    from qwen3_asgi.scheduler.load import LoadSnapshot
    from qwen3_asgi.scheduler.plan import StepPlan

ACTIVE, PREFILLING, DEFERRED = ["a", "b"], ["p"], ["d", "e"]
EVERYONE = [*ACTIVE, *PREFILLING, *DEFERRED]
LENGTHS = {"a": 20, "b": 20, "p": 6, "d": 6, "e": 6}

# One entry of the log: what happened, and to what.
Entry = tuple[str, object]


class Record:
    """The sink, the observer and the trace of one scheduler, written into one log."""

    def __init__(self) -> None:
        self.log: list[Entry] = []
        self.events: list[Event] = []
        self.loads: list[LoadSnapshot] = []
        self.wasted: dict[str, int] = {}
        self.swept_from: dict[str, State] = {}
        self.preempted: list[str] = []
        self.cached_tokens: dict[str, int] = {}

    def trace(self, phase: str) -> None:
        self.log.append(("phase", phase))

    def deliver(self, events: Sequence[Event]) -> None:
        self.events.extend(events)
        self.log.append(("deliver", tuple(event.request_id for event in events)))

    def on_load(self, load: LoadSnapshot) -> None:
        self.loads.append(load)
        self.log.append(("load", load))

    def on_step(self, plan: StepPlan, seconds: float) -> None:
        self.log.append(("step", plan.step))

    def on_step_failure(self, plan: StepPlan, error: Exception) -> None:
        self.log.append(("step failure", plan.step))

    def on_sweep(self, seconds: float, num_swept: int) -> None:
        self.log.append(("sweep", num_swept))

    def on_admit(self, request: Request, cached_tokens: int) -> None:
        self.cached_tokens[request.id] = cached_tokens
        self.log.append(("admit", request.id))

    def on_preempt(self, request: Request) -> None:
        self.preempted.append(request.id)
        self.log.append(("preempt", request.id))

    def on_tokens(
        self, first: Sequence[tuple[Request, float]], intervals: Mapping[float, int]
    ) -> None:
        self.log.append(("tokens", (len(first), sum(intervals.values()))))

    def on_cancel(self, request: Request, state: State, wasted_tokens: int) -> None:
        self.wasted[request.id] = wasted_tokens
        self.swept_from[request.id] = state
        self.log.append(("cancel", request.id))

    def on_finish(self, request: Request, finish: Finish) -> None:
        self.log.append(("finish", request.id))


class HandLanes:
    """`Lanes` whose steps run when the test lands them, as late as can be."""

    def __init__(self, executor: FakeExecutor, *, pipelined: bool) -> None:
        self.pipelined = pipelined
        self._executor = executor
        # The steps of a lane, oldest first; a lane without any is not in it.
        self.running: dict[Lane, deque[StepPlan]] = {}
        self._landed: list[Landed] = []

    def launch(self, lane: Lane, plan: StepPlan) -> None:
        steps = self.running.setdefault(lane, deque())
        assert len(steps) < (2 if lane == "decode" and self.pipelined else 1), "the lane is full"
        steps.append(plan)

    def landed(self) -> list[Landed]:
        landed, self._landed = self._landed, []
        return landed

    def close(self) -> list[Landed]:
        while self.running:
            self.land(*self.running)
        return self.landed()

    def land(self, *lanes: Lane) -> None:
        """Let the oldest step of each of these end; the next iteration finds out."""
        for lane in lanes:
            steps = self.running[lane]
            plan = steps.popleft()
            if not steps:
                del self.running[lane]
            result: StepResult | Exception
            try:
                result = result_of(self._executor.step(plan))
            except Exception as error:
                result = error
            self._landed.append(Landed(lane, plan, result, 0.0))


class Harness:
    """`executor`, `scheduler` and `record`, with the few verbs that tests need.

    Sizes go to the executor; everything else that is passed goes to the scheduler.
    """

    def __init__(
        self,
        *,
        num_kv_blocks: int = 64,
        block_size: int = 4,
        max_context_tokens: int = 4096,
        host_slots: int = 0,
        file_slots: int = 0,
        overlap: bool = False,
        pipelined: bool = False,
        **settings: Any,
    ) -> None:
        self.tiers = FakeTiers(host_slots=host_slots, file_slots=file_slots, by_hand=True)
        self.executor = FakeExecutor(
            num_kv_blocks=num_kv_blocks,
            block_size=block_size,
            max_context_tokens=max_context_tokens,
            tiers=self.tiers if host_slots or file_slots else None,
        )
        self.lanes = HandLanes(self.executor, pipelined=pipelined)
        if overlap or pipelined:
            settings.update(overlap=self.lanes, pipelined=pipelined)
        self.record = Record()
        ticks = count()
        settings.setdefault("clock", lambda: float(next(ticks)))
        settings.setdefault("observer", self.record)
        settings.setdefault("trace", self.record.trace)
        settings.setdefault("max_batch", 8)
        settings.setdefault("max_prefill_tokens", 64)
        sink = settings.pop("sink", self.record)
        self.scheduler = Scheduler(self.executor, sink, **settings)
        self.requests: dict[str, Request] = {}

    def submit(self, name: str, prompt: Sequence[int] | int = 3, **fields: Any) -> Request:
        """Submit; an int as prompt is a length: that many tokens that no other name shares."""
        tokens = prompt_of(name, prompt) if isinstance(prompt, int) else list(prompt)
        fields.setdefault("max_tokens", 4)
        request = Request(name, tokens, **fields)
        self.requests[name] = request
        self.scheduler.submit(request)
        return request

    def load_adapter(self, name: str, seed: int) -> Future[None]:
        done: Future[None] = Future()
        self.scheduler.control(load_adapter(name, seed, f"weights {seed}", done))
        return done

    def unload_adapter(self, name: str) -> Future[None]:
        done: Future[None] = Future()
        self.scheduler.control(unload_adapter(name, done))
        return done

    def cancel(self, *names: str) -> None:
        for name in names:
            self.scheduler.cancel(name)

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            self.scheduler.iterate()
            self.check()

    def run(self, limit: int = 1000) -> None:
        """Step until nothing is live and one more iteration has seen it."""
        for _ in range(limit):
            self.step()
            if self.scheduler.load.idle:
                self.step()
                self.check_idle()
                return
        raise AssertionError(f"still busy after {limit} iterations")

    def land(self) -> None:
        """Whatever runs beside the scheduler ends."""
        self.lanes.land(*list(self.lanes.running))
        self.tiers.land()

    def run_all(self, limit: int = 1000) -> None:
        """`run`, and whatever runs beside the scheduler ends after each turn."""
        for _ in range(limit):
            self.land()
            self.step()
            if self.scheduler.load.idle and not self.lanes.running and not self.tiers.num_running:
                self.step()
                self.check_idle()
                return
        raise AssertionError(f"still busy after {limit} iterations")

    def check(self) -> None:
        self.scheduler.check_integrity()

    def check_idle(self) -> None:
        """Everything is back, and every submitted request has had exactly one terminal event."""
        self.check()
        load = self.scheduler.load
        assert (load.num_running, load.num_waiting, load.kv_used_blocks) == (0, 0, 0)
        ends = Counter(event.request_id for event in self.record.events if event.finish)
        assert ends == Counter(self.requests.keys())

    def queue(self, state: State) -> list[str]:
        return [str(name) for name in self.scheduler.live_requests(state)]

    def order(self) -> list[str]:
        """Every live request, the first to be served first."""
        states = (State.ACTIVE, State.PREFILLING, State.DEFERRED)
        return [name for state in states for name in self.queue(state)]

    def tokens(self, name: str) -> list[int]:
        return [e.token.token_id for e in self.record.events if e.request_id == name and e.token]

    def ends(self, name: str) -> list[Finish]:
        return [e.finish for e in self.record.events if e.request_id == name and e.finish]

    def end(self, name: str) -> Finish:
        (finish,) = self.ends(name)
        return finish

    def num_rows(self, name: str) -> int:
        return len(self.executor.rows_of(name))

    def expected(self, name: str, num_tokens: int) -> list[int]:
        """What the model says after this request's prompt, were it alone."""
        request = self.requests[name]
        adapter = 0 if request.adapter is None else self.executor.adapters[request.adapter]
        return generate(request.token_ids[: request.prompt_len], num_tokens, adapter=adapter)


def prompt_of(name: str, length: int) -> list[int]:
    """A prompt that differs from every other name's in its first token already."""
    return [zlib.crc32(name.encode()) * 1000 + i for i in range(length)]


def busy() -> Harness:
    """Two active, one prefilling (8 of its 40 prompt tokens are forwarded), two deferred."""
    harness = Harness(max_prefill_tokens=8)
    for name in ACTIVE:
        harness.submit(name, 3, max_tokens=LENGTHS[name])
    harness.step()
    for name in [*PREFILLING, *DEFERRED]:
        harness.submit(name, 40 if name in PREFILLING else 5, max_tokens=LENGTHS[name])
    harness.step()
    assert harness.queue(State.ACTIVE) == ACTIVE
    assert harness.queue(State.PREFILLING) == PREFILLING
    assert harness.queue(State.DEFERRED) == DEFERRED
    return harness
