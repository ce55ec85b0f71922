"""Random lives of a scheduler: everything users, clients and devices may do, in any order.

`SchedulerMachine` submits (also forks, with adapters, with deadlines), cancels (also in the middle
of a step or of a drop), loads and unloads adapters, lets steps, rows, copies and sinks fail, clears
the cache, lets steps and copies land late and in any order, and checks the invariants I1 to I7 of
the design after each rule. The pools are tiny, so that preemption and eviction happen all the time.
"""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import TYPE_CHECKING

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from qwen3_asgi.scheduler.executor import Place
from qwen3_asgi.scheduler.request import RUNNING_STATES, WAITING_STATES, State
from qwen3_asgi.testing.fake_executor import generate
from tests.scheduler.fates import EOS, Digits, Fate, FlakySink, Injected, check_end
from tests.scheduler.harness import Harness

if TYPE_CHECKING:
    from concurrent.futures import Future

    from qwen3_asgi.scheduler.plan import RequestId, StepPlan
    from qwen3_asgi.scheduler.request import Request

NUMBER_BITS = 96
NUMBER = st.integers(0, 2**NUMBER_BITS - 1)
MAX_TOKENS = (1, 2, 4, 7, 12, None)


class SchedulerMachine(RuleBasedStateMachine):
    """The rules are what the world does; `check` is what must hold."""

    @initialize(number=NUMBER)
    def start(self, number: int) -> None:
        digits = Digits(number)
        self.sink = FlakySink()
        # Without whatever lets one overtake another, so that the order can be checked.
        self.simple = digits.below(3) == 0
        self.harness = Harness(
            num_kv_blocks=6 + digits.below(8),
            block_size=2 + digits.below(2),
            max_context_tokens=(20, 4096)[digits.below(2)],
            max_batch=2 + digits.below(5),
            max_prefill_tokens=(1, 3, 8, 64)[digits.below(4)],
            prefix_cache=digits.below(8) > 0,
            host_slots=0 if self.simple else (0, 3, 8, 20)[digits.below(4)],
            file_slots=0 if self.simple else (0, 0, 6)[digits.below(3)],
            overlap=not self.simple and digits.below(2) == 0,
            pipelined=not self.simple and digits.below(3) == 0,
            max_failures=10**9,
            sink=self.sink,
            trace=None,
        )
        self.scheduler, self.executor = self.harness.scheduler, self.harness.executor
        self.harness.tiers.by_hand = digits.below(2) == 0
        self.executor.before_step = self.before_step
        self.executor.on_drop = self.on_drop
        self.fates: dict[str, Fate] = {}
        self.prompts: list[tuple[list[int], str, str | None]] = []
        self.cancel_in_step: list[str] = []
        self.cancel_in_drop: list[str] = []
        self.cancelled_in_hook: list[str] = []
        # Cancelled before the iteration that comes: no row of it may be forwarded any more.
        self.gone: set[str] = set()
        # Their step was running when they were cancelled: it may still show, once.
        self.flying: set[str] = set()
        self.step_fails = False
        # What the adapters are, once all commands so far are carried out.
        self.adapters: dict[str, int] = {}
        self.held: set[str] = set()  # waited behind a command, so they have been overtaken
        self.controls: list[Future[None]] = []
        self.num_events = self.num_rows = 0

    # ---- what the world does ----

    @rule(number=NUMBER)
    def submit(self, number: int) -> None:
        digits = Digits(number)
        for _ in range(1 + digits.below(2)):
            self._submit(digits)

    @rule(number=NUMBER)
    def control(self, number: int) -> None:
        digits = Digits(number)
        name = "xy"[digits.below(2)]
        if digits.below(3):
            seed = 1 + digits.below(3)
            self.controls.append(self.harness.load_adapter(name, seed))
            self.adapters[name] = seed
        else:
            self.controls.append(self.harness.unload_adapter(name))
            self.adapters.pop(name, None)

    @rule(number=NUMBER)
    def land(self, number: int) -> None:
        """Some of what runs beside the scheduler ends."""
        digits = Digits(number)
        running = list(self.harness.lanes.running)
        if running and digits.below(3):
            self.harness.lanes.land(running[digits.below(len(running))])
        if self.harness.tiers.num_running:
            self.harness.tiers.land(digits.below(1 + self.harness.tiers.num_running))
        self.iterate()

    @rule(number=NUMBER)
    def cancel(self, number: int) -> None:
        digits = Digits(number)
        where = digits.below(4)
        # The latest more often than the old ones, and sometimes nobody that is known.
        back = digits.below(8)
        names = list(self.fates)
        name = names[-1 - back] if back < len(names) else f"nobody {number}"
        loading = self.harness.queue(State.LOADING)
        if loading and digits.below(2):  # rare by itself
            name = loading[0]
        match where:
            case 0:
                self.cancel_in_step.append(name)
            case 1:
                self.cancel_in_drop.append(name)
            case _:
                self._cancel(name)
                self._note_gone(name)

    @rule(times=st.integers(1, 6))
    def step(self, times: int) -> None:
        for turn in range(times):
            self.iterate()
            if times % 2:
                self.harness.tiers.land(self.harness.tiers.num_running // 2)
            self.harness.lanes.land(*list(self.harness.lanes.running)[: (times + turn) % 3])

    @rule(number=NUMBER)
    def trouble(self, number: int) -> None:
        digits = Digits(number)
        match digits.below(5):
            case 4:
                tiers = self.harness.tiers
                tiers.broken ^= {Place("host", digits.below(4)), Place("file", digits.below(4))}
            case 0:
                self.step_fails = digits.below(2) == 0
            case 1:
                running = self.harness.order()
                if running:
                    name = running[digits.below(len(running))]
                    self.executor.row_errors[name] = "injected"
            case 2:
                self.sink.fails = True
            case _:
                self.scheduler.clear_prefix_cache()
        self.iterate()

    # ---- how it is done ----

    def _submit(self, digits: Digits) -> None:
        max_tokens = MAX_TOKENS[digits.below(len(MAX_TOKENS))]
        length = 1 + digits.below(10)
        shared = 4 * digits.below(4)
        prompt = [(0 if i < shared else 100 * len(self.fates)) + i for i in range(length)]
        forks = 0 if self.simple else (0, 0, 0, 1, 2)[digits.below(5)]
        adapter = (None, None, None, "x", "y")[digits.below(5)]
        salt = "s" * (digits.below(3) == 0)
        if self.prompts and digits.below(3):  # who was there before may be in a tier
            prompt, salt, adapter = self.prompts[digits.below(len(self.prompts))]
        self.prompts.append((prompt, salt, adapter))
        deadline = None
        if digits.below(8) == 0:
            deadline = self.scheduler.clock() + digits.below(200)
        parent: Request | None = None
        for _ in range(1 + forks):
            eos_after = digits.below(4) if digits.below(5) == 0 else None
            request = self._submit_one(
                prompt, max_tokens, adapter, salt, eos_after, deadline, parent
            )
            parent = parent or request

    def _submit_one(
        self,
        prompt: list[int],
        max_tokens: int | None,
        adapter: str | None,
        salt: str,
        eos_after: int | None,
        deadline: float | None,
        parent: Request | None,
    ) -> Request:
        name, length = f"{len(self.fates):03}", len(prompt)
        limit = self.scheduler.limits.max_sequence_tokens
        fits = length + (max_tokens or 1) <= limit
        seed = 0 if adapter is None else self.adapters.get(adapter)
        tokens = generate(
            prompt, limit - length if max_tokens is None else max_tokens, adapter=seed or 0
        )
        if eos_after is not None:
            self.executor.eos_after[name] = eos_after
            tokens[eos_after:] = [EOS] * (len(tokens) > eos_after)
        self.fates[name] = Fate(tokens, fits, seed=seed, deadline=deadline)
        if adapter is not None and not all(control.done() for control in self.controls):
            self.held.add(name)  # maybe for less than one iteration
        return self.harness.submit(
            name,
            prompt,
            max_tokens=max_tokens,
            cache_salt=salt,
            eos_token_ids=[EOS],
            adapter=adapter,
            deadline=deadline,
            fork_of=parent,
        )

    def _note_gone(self, name: str) -> None:
        request = self.harness.requests.get(name)
        if request is None:
            return
        if request.state is State.INFLIGHT:
            self.flying.add(name)
        else:
            self.gone.add(name)

    def _cancel(self, name: str) -> None:
        if name in self.fates:
            self.fates[name].cancelled = True
            parent = self.harness.requests[name]
            for request in self.harness.requests.values():
                if request.fork_of is parent:  # also those that are still on their way
                    self.fates[request.id].cancelled = True
        self.scheduler.cancel(name)

    def _cancel_in_hook(self, names: list[str]) -> None:
        while names:
            name = names.pop()
            self._cancel(name)
            self.cancelled_in_hook.append(name)

    def before_step(self, plan: StepPlan) -> None:
        self._cancel_in_hook(self.cancel_in_step)
        for row in plan.rows:
            if row.dropped:
                continue
            if self.step_fails or row.request_id in self.executor.row_errors:
                self.fates[row.request_id].failed = True
        if self.step_fails:
            self.step_fails = False
            raise Injected("the device is gone")

    def on_drop(self, request_id: RequestId) -> None:
        self._cancel_in_hook(self.cancel_in_drop)

    def iterate(self) -> None:
        self.scheduler.iterate()
        self.check()
        while self.cancelled_in_hook:
            self._note_gone(self.cancelled_in_hook.pop())
        for name in [name for name in self.flying if self._has_landed(name)]:
            self.flying.remove(name)
            self.gone.add(name)

    def _has_landed(self, name: str) -> bool:
        return self.harness.requests[name].state is not State.INFLIGHT

    # ---- what must hold ----

    def check(self) -> None:
        self.scheduler.check_integrity()
        queue = self.harness.queue
        waiting = [name for state in WAITING_STATES for name in queue(state)]
        running = [name for state in RUNNING_STATES for name in queue(state)]
        self.check_rows(running + waiting)
        self.check_order()
        self.check_events()
        self.check_snapshot(running, waiting)
        self.check_sharing(running)
        self.check_steps_ahead(running + waiting)

    def check_rows(self, order: list[str]) -> None:
        """I1: nobody that was cancelled before this iteration was forwarded in it, or lives on."""
        rows = self.executor.rows
        for row in rows[self.num_rows :]:
            assert row.request_id not in self.gone, "forwarded after its cancel"
        self.num_rows = len(rows)
        assert self.gone.isdisjoint(order), "a cancelled request outlives the sweep"

    def check_order(self) -> None:
        """I5: whoever came first is served first, whatever was cancelled, preempted or failed."""
        if not self.simple:
            return
        held = self.harness.queue(State.POST_CONTROL_DEFERRED)
        order = [
            name for name in self.harness.order() if name not in held and name not in self.held
        ]
        self.held.update(held)
        assert order == sorted(order), "somebody lost their place"

    def check_events(self) -> None:
        """I4: one end each and nothing after it. I5: the tokens of a run alone. I7: no others."""
        for event in self.sink.events[self.num_events :]:
            fate = self.fates[event.request_id]
            assert not fate.ends, "an event after the end"
            if event.token is not None:
                assert event.token.token_id == fate.tokens[fate.seen]
                fate.seen += 1
            if event.finish is not None:
                fate.ends.append(event.finish)
                check_end(fate, event.finish)
        self.num_events = len(self.sink.events)

    def check_snapshot(self, running: list[str], waiting: list[str]) -> None:
        """I2: the snapshot says what is; with nobody live that is zero."""
        load, requests = self.scheduler.load, self.harness.requests
        assert (load.num_running, load.num_waiting) == (len(running), len(waiting))
        held = {block for name in running + waiting for block in requests[name].blocks}
        for name in waiting:
            load_of = requests[name].load
            held.update(load_of.blocks if load_of is not None else ())
        assert load.kv_used_blocks == len(held)
        assert not any(self.fates[name].ends for name in running + waiting), "it has ended"

    def check_sharing(self, running: list[str]) -> None:
        """I3: a block in two tables is full, forwarded, and holds the same prefix in both."""
        size = self.executor.block_size
        seen: dict[int, tuple[tuple[str, int | None], list[int]]] = {}
        for name in running:
            request = self.harness.requests[name]
            for index, block in enumerate(request.blocks):
                end = (index + 1) * size
                owner = (request.cache_salt, self.fates[name].seed)
                content = (owner, request.token_ids[:end])
                if block in seen:
                    assert end <= request.num_computed, "a shared block is written to"
                assert seen.setdefault(block, content) == content, "two owners"

    def check_steps_ahead(self, order: list[str]) -> None:
        """I3: what a launched step uses for somebody who has ended, nobody writes to."""
        size, requests = self.executor.block_size, self.harness.requests
        used = {
            block
            for plans in self.harness.lanes.running.values()
            for plan in plans
            for row in plan.rows
            if requests[row.request_id].finished
            for block in row.block_table
        }
        if not used:
            return
        for name in order:
            request = requests[name]
            own = request.blocks[request.num_computed // size :]
            loaded = [] if request.load is None else request.load.blocks
            assert used.isdisjoint(own + loaded), "given away while a step uses it"

    def teardown(self) -> None:
        if not hasattr(self, "harness"):
            return
        for _ in range(900):
            self.harness.land()
            self.iterate()
            if self.scheduler.load.idle and not self.cancel_in_step:
                break
            self.cancel_in_step.clear()
        self.harness.land()
        self.iterate()
        self.harness.check()
        assert all(control.done() for control in self.controls), "a command was forgotten"
        assert self.executor.adapters == self.adapters
        load = self.scheduler.load
        assert (load.num_running, load.num_waiting, load.kv_used_blocks) == (0, 0, 0)
        assert all(len(fate.ends) == 1 for fate in self.fates.values()), "no end, or two"
        admitted = [name for name, request in self.harness.requests.items() if request.admitted]
        assert Counter(self.executor.dropped) == Counter(admitted)


def random_life(seed: int) -> None:
    """One life drawn without Hypothesis: the same for the same seed, and fast."""
    random = Random(seed)
    machine = SchedulerMachine()
    machine.start(number=random.getrandbits(NUMBER_BITS))
    rules = [machine.submit, machine.submit, machine.cancel, machine.cancel, machine.trouble]
    rules += [machine.control, machine.land]
    for _ in range(30):
        random.choice(rules)(number=random.getrandbits(NUMBER_BITS))
        machine.step(times=1 + random.getrandbits(1))
    machine.teardown()
