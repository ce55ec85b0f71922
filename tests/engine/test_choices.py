"""`n` outputs of one prompt: computed once, read together, and ended together."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread
import pytest

from qwen3_asgi.config import EngineConfig, SamplingParams
from qwen3_asgi.engine.binding import RequestBinding, current_binding
from qwen3_asgi.engine.intake import choice_seed
from qwen3_asgi.errors import (
    ClientDisconnected,
    EngineOverloaded,
    GenerationCancelled,
    GenerationFailed,
    InvalidRequest,
)
from qwen3_asgi.testing import fake_engine
from tests.engine.engines import (
    GUARD_SECONDS,
    Gate,
    executor,
    expected,
    running,
    settle,
    toy_engine,
)
from tests.text.toy import toy_tokenizer

if TYPE_CHECKING:
    from qwen3_asgi.engine.output import Delta
    from qwen3_asgi.scheduler.plan import StepPlan
    from qwen3_asgi.testing import FakeExecutor

pytestmark = pytest.mark.anyio

PROMPT = list(range(1, 42))  # two full blocks and a part of one


def choices(n: int, max_tokens: int = 6, **fields: object) -> SamplingParams:
    return SamplingParams(n=n, max_tokens=max_tokens, ignore_eos=True, **fields)  # type: ignore[arg-type]


def prefilled(fake: FakeExecutor) -> int:
    return sum(len(row.token_ids) for row in fake.rows if row.kind == "prefill")


async def test_the_prompt_is_computed_once_for_all() -> None:
    fake = executor()
    # Without the prefix cache: what they share then can only come from the fork.
    async with running(toy_engine(fake, EngineConfig(prefix_cache=False))) as engine:
        output = await engine.generate(prompt_token_ids=PROMPT, params=choices(3))
        assert [o.index for o in output.outputs] == [0, 1, 2]
        assert [list(o.token_ids) for o in output.outputs] == [expected(PROMPT, 6)] * 3
        assert [o.prompt_tokens for o in output.outputs] == [len(PROMPT)] * 3
        assert [o.cached_tokens for o in output.outputs] == [0, len(PROMPT) - 1, len(PROMPT) - 1]
        assert prefilled(fake) == len(PROMPT) + 2  # the forks compute the last token's logits
        assert len(fake.copied_blocks) == 2  # the part of a block that each writes on
        await settle(engine)


async def test_one_output_is_as_without_n() -> None:
    async with running(toy_engine()) as engine:
        output = await engine.generate(prompt_token_ids=PROMPT, params=choices(1))
        assert output.outputs == (output,)
        assert output.others == ()


async def test_the_first_has_the_seed_of_the_request_and_the_others_follow_from_it() -> None:
    seeds: list[dict[str, int]] = []

    def note(plan: StepPlan) -> None:
        for row in plan.rows:
            if row.sample is not None:
                seeds[-1][row.request_id] = row.sample.sampling.seed

    fake = executor()
    fake.before_step = note
    async with running(toy_engine(fake)) as engine:
        for params in (choices(4, seed=7), choices(4, seed=7), choices(1, seed=7)):
            seeds.append({})
            await engine.generate(prompt="hello", params=params)
    once, again, alone = [list(found.values()) for found in seeds]
    assert len(once) == 4
    assert once == again
    assert alone == [7]
    assert once[0] == 7
    assert len(set(once)) == 4
    # A request with the neighbouring seed has no output in common.
    assert not {choice_seed(8, choice) for choice in range(4)} & set(once)
    assert all(0 <= seed < 2**63 for seed in once)


async def test_a_stream_says_which_output_each_delta_is_of() -> None:
    async with running(toy_engine()) as engine:
        whole = await engine.generate(prompt="hello", params=choices(3, 20))
        deltas: list[Delta] = [
            delta async for delta in engine.stream(prompt="hello", params=choices(3, 20))
        ]
    for output in whole.outputs:
        mine = [delta for delta in deltas if delta.index == output.index]
        assert "".join(delta.text for delta in mine) == output.text
        assert [t for delta in mine for t in delta.token_ids] == list(output.token_ids)
        assert [delta.finish_reason for delta in mine if delta.finish_reason] == ["length"]


async def test_no_output_starves_the_others() -> None:
    """A reader that is slow gets what is there of each in turn, not the same one over and over."""
    fake = executor()
    gate = Gate(fake)
    async with running(toy_engine(fake), gate) as engine:
        handle = await engine.submit(prompt="hello", params=choices(3, 50))
        order = []
        for step in range(2, 12):
            await gate.held(step - 1)
            gate.allow(1)
            await gate.held(step)
            order.append((await anext(handle)).choice)
        assert set(Counter(order[2:]).values()) <= {2, 3, 4}
        assert set(order) == {0, 1, 2}
        handle.cancel()


async def test_threads_read_all_outputs() -> None:
    async with running(toy_engine()) as engine:
        output = await anyio.to_thread.run_sync(
            lambda: engine.generate_sync(prompt_token_ids=PROMPT, params=choices(3, 30))
        )
        assert [list(o.token_ids) for o in output.outputs] == [expected(PROMPT, 30)] * 3
        await settle(engine)


@pytest.mark.parametrize("way", ["dropped", "cancelled"])
async def test_leaving_the_handle_ends_all(way: str) -> None:
    fake = executor()
    gate = Gate(fake)
    async with running(toy_engine(fake), gate) as engine:
        handle = await engine.submit(prompt="hello", params=choices(5, 3000))
        gate.allow(3)
        await gate.held(4)
        assert engine.load().num_running == 5
        if way == "dropped":
            del handle
        else:
            handle.cancel()
        gate.open()
        await settle(engine)
        assert gate.arrived == 4
        assert len(fake.dropped) == 5
        if way == "cancelled":
            for _ in range(2):
                with pytest.raises(GenerationCancelled):
                    [batch async for batch in handle]


async def test_the_others_can_be_left_when_the_first_has_ended() -> None:
    fake = executor()
    gate = Gate(fake)
    engine = fake_engine(fake, tokenizer=toy_tokenizer(), eos_token_ids=(0,))
    async with running(engine, gate):
        params = SamplingParams(n=3, max_tokens=3000)
        handle = await engine.submit(prompt="hello", params=params)
        fake.eos_after[handle.request_id] = 2
        gate.allow(5)
        await gate.held(6)
        assert fake.dropped == [handle.request_id]
        ended = [(await anext(handle)).choice for _ in range(3)]
        assert ended == [0, 1, 2]
        assert handle.finish is None
        del handle
        gate.open()
        await settle(engine)
        assert gate.arrived == 6
        assert len(fake.dropped) == 3


async def test_all_that_a_gone_client_asked_for_ends_with_it() -> None:
    fake = executor()
    gate = Gate(fake)
    binding = RequestBinding()
    async with running(toy_engine(fake), gate) as engine:
        token = current_binding.set(binding)
        handle = await engine.submit(prompt="hello", params=choices(4, 3000))
        current_binding.reset(token)
        gate.allow(2)
        await gate.held(3)
        binding.disconnect("streaming")
        gate.open()
        await settle(engine)  # also if nobody reads
        assert gate.arrived == 3
        with pytest.raises(ClientDisconnected):
            [batch async for batch in handle]


async def test_an_output_that_fails_ends_the_others() -> None:
    fake = executor()
    gate = Gate(fake)
    async with running(toy_engine(fake), gate) as engine:
        handle = await engine.submit(prompt="hello", params=choices(3, 3000))
        await gate.held(1)
        gate.allow(3)
        await gate.held(4)
        fake.row_errors[f"{handle.request_id}-1"] = "NaN logits"
        gate.open()
        with anyio.fail_after(GUARD_SECONDS), pytest.raises(GenerationFailed, match="NaN logits"):
            [batch async for batch in handle]
        await settle(engine)
        with pytest.raises(GenerationFailed, match="NaN logits"):
            await anext(handle)


async def test_a_copy_that_fails_costs_time_and_nothing_else() -> None:
    fake = executor()

    def refuse(pairs: object) -> None:
        raise RuntimeError("no copy")

    fake.copy_blocks = refuse  # type: ignore[method-assign]
    async with running(toy_engine(fake)) as engine:
        output = await engine.generate(prompt_token_ids=PROMPT, params=choices(3))
        assert [list(o.token_ids) for o in output.outputs] == [expected(PROMPT, 6)] * 3
        await settle(engine)


async def test_more_outputs_than_run_at_the_same_time_come_one_after_the_other() -> None:
    config = EngineConfig(max_batch=2)
    async with running(toy_engine(executor(), config)) as engine:
        output = await engine.generate(prompt_token_ids=PROMPT, params=choices(7))
        assert [list(o.token_ids) for o in output.outputs] == [expected(PROMPT, 6)] * 7
        await settle(engine)


@pytest.mark.parametrize(
    "config", [EngineConfig(max_n=3), EngineConfig(max_n=9, max_queue=1, max_batch=2)]
)
async def test_too_many_outputs_are_refused_before_anything_is_done(config: EngineConfig) -> None:
    async with running(toy_engine(config=config)) as engine:
        with pytest.raises(InvalidRequest, match="n must be at most 3") as caught:
            await engine.submit(prompt="hello", params=choices(4))
        assert caught.value.param == "n"
        with pytest.raises(InvalidRequest, match="n must be at most 3"):
            await anyio.to_thread.run_sync(
                lambda: engine.submit_sync(prompt="hello", params=choices(4))
            )
        assert engine.state == "new"
        assert len((await engine.generate(prompt="hello", params=choices(3))).outputs) == 3


@pytest.mark.parametrize("n", [0, -1, 10**6])
def test_n_is_checked(n: int) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(n=n)
    assert caught.value.param == "n"


async def test_the_queue_takes_all_outputs_of_a_request_or_none() -> None:
    fake = executor()
    gate = Gate(fake)
    config = EngineConfig(max_batch=2, max_queue=3)
    async with running(toy_engine(fake, config), gate) as engine:
        handle = await engine.submit(prompt="hello", params=choices(4))
        with pytest.raises(EngineOverloaded):
            await engine.submit(prompt="hello", params=choices(2))
        assert engine.live_requests == 4
        last = await engine.submit(prompt="hello", params=choices(1))
        assert engine.live_requests == 5
        handle.cancel()
        last.cancel()
