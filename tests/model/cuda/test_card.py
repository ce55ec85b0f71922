"""On a card alone: graphs, bf16, and a storm through a whole engine."""

from __future__ import annotations

import asyncio
import random

import pytest
import torch

from qwen3_asgi.config import EngineConfig, SamplingParams
from qwen3_asgi.engine.engine import Engine
from qwen3_asgi.errors import GenerationCancelled
from qwen3_asgi.model.executor import load_executor
from qwen3_asgi.model.operators import TorchOperators
from qwen3_asgi.model.shapes import named_shape
from qwen3_asgi.scheduler.plan import (
    PENDING,
    RequestId,
    Row,
    RowKind,
    SampleSpec,
    Sampling,
    StepPlan,
    StepResult,
    result_of,
)
from qwen3_asgi.testing import assert_idle_async
from tests.model.cuda.executors import needs_card

GREEDY = Sampling(temperature=0.0)
BATCH = 5
STEPS = 24
PROMPT_TOKENS = 700  # two pieces
STORM = 64
GUARD_SECONDS = 60.0


@pytest.fixture(scope="module")
def executor():
    config = EngineConfig(
        device="cuda",
        load_format="dummy",
        max_batch=8,
        max_context_tokens=2048,
        num_kv_blocks=8 * 128,
    )
    executor = load_executor(named_shape("Qwen3-0.6B"), config, owned_token_ids=151_669)
    yield executor
    executor.close()


def rows_of(tokens, start, kind: RowKind):
    return tuple(
        Row(
            RequestId(str(i)),
            kind,
            list(tokens[i]),
            start,
            list(range(128 * i, 128 * (i + 1))),
            SampleSpec(GREEDY, 0),
        )
        for i in range(len(tokens))
    )


def prefilled(executor):
    source = random.Random(3)
    prompts = [source.choices(range(151_000), k=PROMPT_TOKENS) for _ in range(BATCH)]
    first = result_of(executor.step(StepPlan(0, rows_of(prompts, 0, "prefill"))))
    assert not first.errors
    return prompts, [[first.tokens[RequestId(str(i))].token_id] for i in range(BATCH)]


def continued(executor, *, ahead):
    """Greedy tokens of `STEPS` steps, each launched before the last one's tokens are read."""
    _, outputs = prefilled(executor)
    running = []
    for step in range(1, STEPS + 1):
        pending = ahead and step > 1
        tokens = [[PENDING if pending else output[-1]] for output in outputs]
        rows = rows_of(tokens, PROMPT_TOKENS + step - 1, "decode")
        running.append(executor.step(StepPlan(step, rows, step - 1 if pending else None)))
        if not ahead or len(running) == 2:
            read(running.pop(0), outputs)
    for step in running:
        read(step, outputs)
    return outputs


def read(step, outputs):
    result = result_of(step)
    assert not result.errors
    for i, output in enumerate(outputs):
        output.append(result.tokens[RequestId(str(i))].token_id)


@needs_card
def test_graphs_ahead_of_their_tokens_give_what_steps_one_by_one_give(executor):
    assert executor.dtype == torch.bfloat16
    assert executor._cuda is not None, "the kernels failed their trial on this card"
    one_by_one = continued(executor, ahead=False)
    assert continued(executor, ahead=True) == one_by_one
    decode = executor._cuda.decode
    graphs = dict(decode._graphs)
    decode.start(lambda run: run)
    try:
        assert continued(executor, ahead=True) == one_by_one, "a graph replays something else"
    finally:
        decode._graphs = graphs


@needs_card
def test_a_decode_step_is_returned_before_the_device_has_run_it(executor):
    _, outputs = prefilled(executor)
    rows = rows_of([output[-1:] for output in outputs], PROMPT_TOKENS, "decode")
    assert not isinstance(executor.step(StepPlan(1, rows)), StepResult)


@needs_card
def test_logits_in_bf16_are_those_of_the_plain_operators(executor):
    prompts, _ = prefilled(executor)
    chunk = rows_of([prompts[0][:200]], 0, "prefill")
    found = executor.forward_logits(chunk)
    model, _ = executor._loaded
    kernels = model.operators
    model.operators = TorchOperators(16, 8, 128, 1e-6)
    try:
        wanted = executor.forward_logits(chunk)
    finally:
        model.operators = kernels
    similar = torch.nn.functional.cosine_similarity(found, wanted, dim=1)
    assert float(similar.min()) > 0.99


@needs_card
@pytest.mark.parametrize("ahead", [False, True])
def test_a_storm_leaves_nothing_behind_and_a_follow_up_gets_the_same_tokens(ahead):
    settings = EngineConfig(device="cuda", max_batch=16, overlap=ahead, pipelined=ahead)
    params = SamplingParams(max_tokens=24, temperature=0)

    async def main():
        async with Engine("tiny", settings) as engine:
            alone = await engine.generate(prompt="What is the capital of France?", params=params)
            long = SamplingParams(max_tokens=400, temperature=1, ignore_eos=True)
            handles = [
                await engine.submit(prompt=f"Once upon a time, {i}", params=long)
                for i in range(STORM)
            ]
            started = aiter(handles[0])
            await anext(started)  # they are under way
            for handle in handles:
                handle.cancel()
            with pytest.raises(GenerationCancelled):
                async for _ in started:
                    pass
            again = await engine.generate(prompt="What is the capital of France?", params=params)
            assert again.token_ids == alone.token_ids
            await assert_idle_async(engine)

    asyncio.run(asyncio.wait_for(main(), GUARD_SECONDS))
