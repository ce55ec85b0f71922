"""All six states: how requests get there, and one sweep that drops them from all but `inflight`."""

from __future__ import annotations

import pytest

from qwen3_asgi.errors import GenerationTimeout, InvalidRequest
from qwen3_asgi.scheduler.request import State
from tests.scheduler.harness import Harness, prompt_of

OLD = 24  # tokens of a prompt that is in host memory by then


def everywhere(*, control: bool = True, **settings: object) -> Harness:
    """One request in each state that is swept: active, prefilling, loading, held, deferred.

    The held one waits behind the replacement of the adapter that the active one uses.
    """
    harness = Harness(
        num_kv_blocks=24,
        host_slots=16,
        max_prefill_tokens=8,
        max_batch=3,
        **settings,  # type: ignore[arg-type]
    )
    spill(harness, "old")
    assert harness.load_adapter("x", 7) is not None
    harness.submit("active", 3, max_tokens=20, adapter="x")
    harness.step()
    if control:
        harness.load_adapter("x", 8)
        harness.submit("held", 5, adapter="x")
    harness.submit("loading", prompt_of("old", OLD), max_tokens=4)
    harness.submit("prefilling", 30, max_tokens=4)
    harness.step()
    harness.submit("deferred", 30, max_tokens=4)
    harness.submit("deferred too", 5, max_tokens=4)
    harness.step()
    assert harness.queue(State.ACTIVE) == ["active"]
    assert harness.queue(State.PREFILLING) == ["prefilling"]
    assert harness.queue(State.LOADING) == ["loading"]
    assert harness.queue(State.POST_CONTROL_DEFERRED) == ["held"] * control
    assert harness.queue(State.DEFERRED) == ["deferred", "deferred too"]
    return harness


def spill(harness: Harness, name: str) -> None:
    """A prompt is computed, and then others drive its blocks into host memory."""
    harness.submit(name, OLD, max_tokens=1)
    harness.run()
    limit = harness.scheduler.limits.max_sequence_tokens
    harness.submit(f"{name} driver", limit - 2, max_tokens=1)
    harness.run()
    harness.tiers.land()
    harness.step()
    assert harness.tiers.copied


@pytest.mark.parametrize("control", [True, False], ids=["control pending", "no control"])
def test_one_sweep_drops_the_cancelled_from_every_queue(control: bool) -> None:
    harness = everywhere(control=control)
    gone = ["active", "prefilling", "loading", "deferred"] + ["held"] * control
    rows = {name: harness.num_rows(name) for name in gone}
    held = harness.scheduler.load.kv_used_blocks
    harness.record.log.clear()
    harness.cancel(*gone)
    harness.step()

    assert {harness.record.swept_from[name] for name in gone} == {
        State.ACTIVE,
        State.PREFILLING,
        State.LOADING,
        State.DEFERRED,
        *([State.POST_CONTROL_DEFERRED] if control else []),
    }
    phases = [what for kind, what in harness.record.log if kind == "phase"]
    assert phases == [
        "drain",
        "sweep",
        "publish",
        "reclaim",
        "prefetch",
        *(["control"] if control else []),
        "admit",
        "plan",
        "execute",
        "resolve",
        "deliver",
    ]
    deeds = [entry for entry in harness.record.log if entry[0] in ("phase", "cancel", "load")]
    at = [what for _, what in deeds].index
    published = next(
        index for index, (kind, _) in enumerate(deeds) if kind == "load" and index > at("publish")
    )
    assert at("sweep") < at("active") < at("publish") < published < at("reclaim")
    swept = deeds[published][1]
    assert (swept.num_running, swept.num_waiting) == (0, 1)  # type: ignore[attr-defined]
    assert held > swept.kv_used_blocks == 0  # type: ignore[attr-defined]
    assert {name: harness.num_rows(name) for name in gone} == rows, "forwarded after its cancel"
    assert all(harness.end(name).reason == "abort" for name in gone)
    harness.run_all()
    assert harness.tokens("deferred too") == harness.expected("deferred too", 4)


def test_survivors_of_the_sweep_go_on_from_every_queue() -> None:
    harness = everywhere()
    harness.cancel("deferred too")
    harness.step()
    harness.run_all()
    harness.requests["active"].adapter = None  # replaced meanwhile
    for name in ("loading", "prefilling", "deferred", "held"):
        assert harness.tokens(name) == harness.expected(name, 4), name
    assert harness.end("loading").cached_tokens == OLD - 4


def test_requests_in_flight_are_swept_when_their_step_has_landed() -> None:
    harness = Harness(overlap=True, max_prefill_tokens=8)
    harness.submit("a", 3, max_tokens=9)
    harness.submit("b", 3, max_tokens=9)
    harness.step()
    harness.land()
    harness.step()
    assert harness.queue(State.INFLIGHT) == ["a", "b"]
    blocks = list(harness.requests["a"].blocks)
    harness.cancel("a")
    for _ in range(3):
        harness.step()
        assert harness.queue(State.INFLIGHT) == ["a", "b"], "its step is still running"
        assert harness.requests["a"].blocks == blocks
    rows = harness.num_rows("a")
    harness.land()
    harness.step()
    assert harness.num_rows("a") == rows + 1, "the step that was running"
    assert harness.record.swept_from["a"] is State.ACTIVE
    harness.run_all()
    assert harness.num_rows("a") == rows + 1
    assert harness.tokens("b") == harness.expected("b", 9)


def test_a_long_prefill_runs_beside_decode() -> None:
    harness = Harness(overlap=True, max_prefill_tokens=8)
    harness.submit("a", 3, max_tokens=9)
    harness.step()
    harness.land()
    harness.submit("long", 20, max_tokens=3)
    harness.step()
    assert set(harness.lanes.running) == {"decode", "prefill"}
    for _ in range(3):
        harness.lanes.land("decode")
        harness.step()
    assert len(harness.tokens("a")) == 4, "the prefill has not landed, decode goes on"
    harness.run_all()
    assert harness.tokens("a") == harness.expected("a", 9)
    assert harness.tokens("long") == harness.expected("long", 3)


def test_a_cancelled_load_leaves_at_once_and_its_blocks_are_nobodys_until_it_lands() -> None:
    harness = everywhere()
    request = harness.requests["loading"]
    assert request.load is not None
    blocks = set(request.load.blocks)
    harness.cancel("loading")
    harness.step()
    assert harness.queue(State.LOADING) == []
    assert harness.end("loading").reason == "abort"
    assert harness.tiers.num_running, "nobody waited for the copy"
    for name in ("x1", "x2", "x3"):
        harness.submit(name, 8, max_tokens=8)
    for _ in range(12):
        harness.step()
        taken = {block for request in harness.requests.values() for block in request.blocks}
        assert not taken & blocks, "a copy would land in somebody else's block"
    harness.tiers.land()
    harness.run_all()
    assert harness.scheduler.load.kv_used_blocks == 0


def test_a_failed_load_is_computed_instead() -> None:
    harness = Harness(num_kv_blocks=24, host_slots=16)
    spill(harness, "old")
    second = prompt_of("old", OLD)[4:8]
    (store,) = (c for c in harness.tiers.copied if list(c.content.token_ids) == second)
    harness.tiers.broken.add(store.target)
    harness.submit("loading", prompt_of("old", OLD), max_tokens=4)
    harness.step()
    assert harness.queue(State.LOADING) == ["loading"]
    harness.run_all()
    assert harness.tokens("loading") == harness.expected("loading", 4)
    assert harness.end("loading").cached_tokens == 4, "the block before the broken one"


def test_loads_go_to_the_front_in_their_order() -> None:
    harness = Harness(num_kv_blocks=40, host_slots=100, max_batch=2)
    for name in ("old", "older"):
        spill(harness, name)
    harness.submit("running", 3, max_tokens=30)
    harness.submit("running too", 3, max_tokens=30)
    harness.step()
    harness.submit("waiting", 5)
    harness.step()
    harness.submit("first", prompt_of("old", OLD))
    harness.submit("second", prompt_of("older", OLD))
    harness.step()
    assert harness.queue(State.LOADING) == ["first", "second"]
    harness.tiers.land()
    harness.step()
    assert harness.queue(State.DEFERRED) == ["first", "second", "waiting"]
    harness.run_all()


def test_a_load_never_takes_what_the_running_need_next() -> None:
    harness = Harness(num_kv_blocks=24, host_slots=16)
    spill(harness, "old")
    harness.submit("big", 76, max_tokens=4)
    harness.step()
    harness.submit("loading", prompt_of("old", OLD), max_tokens=4)
    harness.step()
    assert harness.queue(State.LOADING) == []
    harness.run_all()
    assert harness.record.preempted == []
    assert harness.tokens("loading") == harness.expected("loading", 4)


def test_an_adapter_that_nobody_uses_is_loaded_without_waiting() -> None:
    harness = Harness()
    harness.submit("a", 3, max_tokens=20)
    harness.step()
    done = harness.load_adapter("x", 3)
    harness.submit("b", 3, max_tokens=4, adapter="x")
    harness.step()
    assert done.done()
    assert harness.queue(State.ACTIVE) == ["a", "b"]
    harness.run_all()
    assert harness.tokens("b") == harness.expected("b", 4)


def test_unloading_waits_for_those_who_came_before_and_refuses_those_behind() -> None:
    harness = Harness()
    harness.load_adapter("x", 3)
    harness.submit("before", 3, max_tokens=6, adapter="x")
    harness.step()
    done = harness.unload_adapter("x")
    harness.submit("behind", 3, adapter="x")
    harness.submit("base", 3, max_tokens=4)
    harness.step()
    assert not done.done()
    assert harness.queue(State.POST_CONTROL_DEFERRED) == ["behind"]
    assert harness.queue(State.ACTIVE) == ["before", "base"], "the base model waits for nobody"
    expected = harness.expected("before", 6)
    harness.run_all()
    assert done.result(0) is None
    assert harness.tokens("before") == expected
    error = harness.end("behind").error
    assert isinstance(error, InvalidRequest)
    assert (error.param, error.code) == ("model", "model_not_found")


def test_a_failing_control_says_so_and_holds_nobody() -> None:
    harness = Harness()
    assert harness.unload_adapter("nothing") is not None
    done = harness.unload_adapter("nothing")
    harness.step()
    with pytest.raises(KeyError):
        done.result(0)


def test_adapters_never_share_a_prefix() -> None:
    harness = Harness()
    for seed, name in enumerate(("x", "y"), 5):
        harness.load_adapter(name, seed)
    prompt = prompt_of("same", 16)
    for number, adapter in enumerate(("x", "y", None, "x", None)):
        harness.submit(f"{number}", prompt, max_tokens=4, adapter=adapter)
        harness.run_all()
        assert harness.tokens(f"{number}") == harness.expected(f"{number}", 4)
    assert [harness.end(f"{number}").cached_tokens for number in range(5)] == [0, 0, 0, 12, 12]


def test_forks_share_one_prefill() -> None:
    harness = Harness(max_prefill_tokens=8)
    parent = harness.submit("0", prompt_of("same", 22), max_tokens=5)
    for name in ("1", "2"):
        harness.submit(name, prompt_of("same", 22), max_tokens=5, fork_of=parent)
    harness.run_all()
    for name in ("0", "1", "2"):
        assert harness.tokens(name) == harness.expected(name, 5)
    prefilled = sum(len(row.token_ids) for row in harness.executor.rows if row.kind == "prefill")
    assert prefilled == 22 + 2, "the prompt once, and its last token for each fork"
    assert len(harness.executor.copied_blocks) == 2


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 4])
def test_cancelling_the_parent_cancels_its_forks(steps: int) -> None:
    harness = Harness(max_prefill_tokens=8)
    parent = harness.submit("0", prompt_of("same", 22), max_tokens=9)
    for name in ("1", "2"):
        harness.submit(name, prompt_of("same", 22), max_tokens=9, fork_of=parent)
    harness.submit("other", 5, max_tokens=4)
    harness.step(steps)
    harness.cancel("0")
    harness.step()
    assert all(harness.end(name).reason == "abort" for name in ("0", "1", "2"))
    harness.run_all()
    assert harness.tokens("other") == harness.expected("other", 4)


def test_forks_of_a_parent_that_is_gone_are_served_alone() -> None:
    harness = Harness(max_prefill_tokens=8)
    parent = harness.submit("0", prompt_of("same", 22), max_tokens=5)
    harness.submit("1", prompt_of("same", 22), max_tokens=5, fork_of=parent)
    harness.executor.row_errors["0"] = "broken"
    harness.run_all()
    assert harness.end("0").reason == "error"
    assert harness.tokens("1") == harness.expected("1", 5)


def test_the_urgent_are_admitted_first_and_preempted_last() -> None:
    harness = Harness(max_batch=1)
    harness.submit("running", 3, max_tokens=3)
    harness.step()
    for name, priority in (("late", 5), ("normal", 0), ("urgent", -5), ("normal too", 0)):
        harness.submit(name, 3, max_tokens=1, priority=priority)
    harness.run_all()
    ends = [event.request_id for event in harness.record.events if event.finish]
    assert ends == ["running", "urgent", "normal", "normal too", "late"]


def test_a_request_past_its_deadline_ends_wherever_it_is() -> None:
    now = [0.0]
    harness = Harness(clock=lambda: now[0], max_batch=1)
    harness.submit("active", 3, max_tokens=50, deadline=10.0)
    harness.submit("deferred", 3, max_tokens=50, deadline=5.0)
    harness.submit("patient", 3, max_tokens=2, deadline=50.0)
    harness.step(2)
    now[0] = 5.0
    harness.step()
    assert isinstance(harness.end("deferred").error, GenerationTimeout)
    now[0] = 10.0
    harness.step()
    assert isinstance(harness.end("active").error, GenerationTimeout)
    assert harness.end("active").reason == "error"
    harness.run_all()
    assert harness.end("patient").reason == "length"


def test_repeated_failures_end_the_loop() -> None:
    from qwen3_asgi.errors import EngineDead

    harness = Harness(max_failures=3, max_batch=1)

    def fail(plan: object) -> None:
        raise RuntimeError("the device is gone")

    harness.executor.before_step = fail
    for name in "abcde":
        harness.submit(name, 3)
    with pytest.raises(EngineDead, match="3 steps in a row"):
        harness.scheduler.run()
    assert {name: str(harness.end(name).error) for name in "abcde"} == {
        **dict.fromkeys("abc", "the forward pass failed: RuntimeError: the device is gone"),
        **dict.fromkeys(
            "de", "3 steps in a row have failed, the last with RuntimeError('the device is gone')"
        ),
    }
    load = harness.scheduler.load
    assert (load.num_running, load.num_waiting, load.kv_used_blocks) == (0, 0, 0)


def test_integrity_check_sees_a_shared_block_that_is_written_to() -> None:
    harness = Harness()
    first, second = harness.submit("a", 3), harness.submit("b", 3)
    harness.step()
    harness.scheduler._pool.share(first.blocks[-1:])
    second.blocks.append(first.blocks[-1])
    with pytest.raises(RuntimeError, match="request a writes to shared KV blocks"):
        harness.check()
