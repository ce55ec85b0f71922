"""`StepGate`: steps pass, are held, are counted and fail as a test says."""

from __future__ import annotations

import anyio
import pytest

from qwen3_asgi import EngineConfig, GenerationFailed, SamplingParams
from qwen3_asgi.testing import FakeExecutor, StepGate, assert_idle, fake_engine

PARAMS = SamplingParams(max_tokens=5, ignore_eos=True)


def test_a_held_step_is_the_last_until_it_is_allowed() -> None:
    gate = StepGate(open=False)
    executor = FakeExecutor(gate=gate, num_kv_blocks=64, vocab_size=256)
    with fake_engine(executor) as engine:
        handle = engine.submit_sync(prompt_token_ids=[1, 2, 3], params=PARAMS)
        assert gate.held_sync() == 1
        assert gate.plan is not None
        assert [row.request_id for row in gate.plan.rows] == [handle.request_id]
        gate.allow(2)
        assert gate.held_sync() == 3
        assert executor.plans == 3
        gate.open()
        assert [len(batch.tokens) > 0 for batch in handle.read_sync()][-1]
        assert gate.arrived == 5
        assert_idle(engine)


def test_allow_lets_the_held_step_go_first_and_a_new_hold_does_not_take_it_back() -> None:
    gate = StepGate()
    with fake_engine(gate=gate) as engine:
        gate.hold()
        handle = engine.submit_sync(prompt="hello", params=PARAMS)
        gate.held_sync(1)
        for step in range(2, 6):
            gate.open()
            gate.hold()
            assert gate.held_sync(step) == step
        gate.open()
        list(handle.read_sync())


def test_one_gate_holds_two_engines() -> None:
    gate = StepGate(open=False)
    with fake_engine(gate=gate) as one, fake_engine(gate=gate) as two:
        handles = [e.submit_sync(prompt="hello", params=PARAMS) for e in (one, two)]
        gate.held_sync(2)
        gate.allow(1)
        gate.held_sync(3)  # of the one that was let go; the other one stands where it was
        assert one.load().num_running == two.load().num_running == 1
        gate.open()
        for handle in handles:
            list(handle.read_sync())


def test_a_failing_step_fails_its_requests_and_no_others() -> None:
    gate = StepGate()
    with fake_engine(gate=gate) as engine:
        gate.fail(RuntimeError("out of memory"))
        with pytest.raises(GenerationFailed, match="out of memory"):
            engine.generate_sync(prompt="hello", params=PARAMS)
        assert len(engine.generate_sync(prompt="hello", params=PARAMS).token_ids) == 5
        assert_idle(engine)


def test_a_step_that_nobody_lets_go_fails_and_says_why() -> None:
    gate = StepGate(open=False, guard_seconds=0.01)
    with fake_engine(gate=gate) as engine:
        with pytest.raises(GenerationFailed, match=r"held for 0\.01 s"):
            engine.generate_sync(prompt="hello", params=PARAMS)
        gate.open()
        engine.generate_sync(prompt="hello", params=PARAMS)


def test_waiting_for_a_step_that_never_comes_fails() -> None:
    gate = StepGate(open=False, guard_seconds=0.01)
    with pytest.raises(AssertionError, match="a step was not held"):
        gate.held_sync()
    with pytest.raises(AssertionError, match="step 3 was not held"):
        gate.held_sync(3)


@pytest.mark.anyio
async def test_waiting_for_a_step_can_be_cancelled_and_fails_in_the_end() -> None:
    gate = StepGate(open=False, guard_seconds=0.01)
    with pytest.raises(AssertionError, match="a step was not held"):
        await gate.held()
    slow = StepGate(open=False)
    async with anyio.create_task_group() as group:
        group.start_soon(slow.held)
        await anyio.lowlevel.checkpoint()
        group.cancel_scope.cancel()


@pytest.mark.anyio
async def test_the_event_loop_goes_on_while_it_waits_for_a_step() -> None:
    gate = StepGate(open=False)
    config = EngineConfig(max_batch=2)
    arrived = []
    async with fake_engine(gate=gate, config=config) as engine:
        async with anyio.create_task_group() as group:

            async def wait() -> None:
                arrived.append(await gate.held())
                group.cancel_scope.cancel()

            group.start_soon(wait)
            await engine.generate(prompt="hello", params=PARAMS)
        gate.open()
    assert arrived == [1]
