"""A whole executor in the CUDA kernels gives transformers' tokens, under the scheduler, too."""

from __future__ import annotations

import logging
import random
import threading

import pytest
import torch

from qwen3_asgi.model.cuda import steps
from qwen3_asgi.model.cuda.operators import CudaOperators
from qwen3_asgi.model.lora import Adapter, Part
from qwen3_asgi.model.operators import TorchOperators
from qwen3_asgi.model.self_check import find_fault
from qwen3_asgi.model.splitting import split
from qwen3_asgi.scheduler.loop import Scheduler
from qwen3_asgi.scheduler.plan import (
    PENDING,
    RequestId,
    Row,
    SampleSpec,
    Sampling,
    StepPlan,
    StepResult,
    result_of,
)
from qwen3_asgi.scheduler.request import Request
from tests.model.checkpoints import VOCAB, greedy, load, load_reference, write_checkpoint
from tests.model.cuda.executors import Watched, load_on_kernels
from tests.model.cuda.world import DEVICE, needs_kernels
from tests.model.driver import Driver, Sequence_
from tests.scheduler.harness import Record

pytestmark = needs_kernels

NEW_TOKENS = 4
GREEDY = Sampling(temperature=0.0)
GUARD_SECONDS = 60.0
MARK = 0.25


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    # As little as shows everything: the interpreter takes a millisecond for a token's head.
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    return write_checkpoint(tmp_path_factory.mktemp("tied"), "tied", **sizes)


@pytest.fixture(scope="module")
def reference(folder):
    return load_reference(folder)


@pytest.fixture(scope="module")
def prompts():
    """Two of them begin alike."""
    source = random.Random(11)
    shared = source.choices(range(VOCAB), k=5)
    lengths = (3, 4, 9, 6)
    return [
        (shared if index % 2 else []) + source.choices(range(VOCAB), k=length)
        for index, length in enumerate(lengths)
    ]


@pytest.fixture(scope="module")
def expected(reference, prompts):
    return [greedy(reference, prompt, NEW_TOKENS) for prompt in prompts]


@pytest.fixture(scope="module")
def executor(folder):
    return load_on_kernels(folder)


def submit(scheduler, prompts, *, turn=0, max_tokens=NEW_TOKENS):
    for index, prompt in enumerate(prompts):
        scheduler.submit(Request(f"{turn}.{index}", prompt, sampling=GREEDY, max_tokens=max_tokens))


def run_to_idle(scheduler):
    scheduler.iterate()
    while not scheduler.load.idle:
        scheduler.iterate()
        scheduler.check_integrity()


def outputs(record, count, turn=0):
    events = [event for event in record.events if event.token is not None]
    return [
        [e.token.token_id for e in events if e.request_id == f"{turn}.{index}"]
        for index in range(count)
    ]


def test_chunks_beside_decode_and_prefix_hits(executor, prompts, expected):
    watched, record = Watched(executor), Record()
    scheduler = Scheduler(watched, record, max_prefill_tokens=7, observer=record)
    submit(scheduler, prompts)
    run_to_idle(scheduler)
    assert outputs(record, len(prompts)) == expected
    assert watched.kinds == {"prefill", "mixed", "decode"}
    assert watched.running
    submit(scheduler, prompts, turn=1)
    run_to_idle(scheduler)
    assert outputs(record, len(prompts), turn=1) == expected
    assert record.cached_tokens["1.1"] == 8


def test_preempted_and_resumed(folder, reference, prompts):
    # Both begin in 4 of 6 blocks, and want 4 and 5 in the end.
    record = Record()
    scheduler = Scheduler(load_on_kernels(folder, num_kv_blocks=6), record, observer=record)
    submit(scheduler, prompts[:2], max_tokens=10)
    run_to_idle(scheduler)
    assert record.preempted
    assert outputs(record, 2) == [greedy(reference, prompt, 10) for prompt in prompts[:2]]


class Finishes(Record):
    """Tells when so many requests have ended."""

    def __init__(self, count):
        super().__init__()
        self.done = threading.Event()
        self._left = count

    def deliver(self, events):
        super().deliver(events)
        self._left -= sum(event.finish is not None for event in events)
        if not self._left:
            self.done.set()


def test_steps_ahead_of_their_tokens(executor, prompts, expected):
    """Pipelined: what a step samples goes into the next one without the host."""
    watched, record = Watched(executor), Finishes(len(prompts))
    scheduler = Scheduler(
        watched, record, max_prefill_tokens=7, overlap=True, pipelined=True, observer=record
    )
    submit(scheduler, prompts)
    thread = threading.Thread(target=scheduler.run, daemon=True)
    thread.start()
    assert record.done.wait(GUARD_SECONDS)
    scheduler.stop()
    thread.join(GUARD_SECONDS)
    assert not thread.is_alive()
    assert outputs(record, len(prompts)) == expected
    assert watched.pending


def adapter_of(config):
    """Changes every layer's queries and what leaves the MLP."""
    generator = torch.Generator().manual_seed(5)

    def part(inputs, outputs):
        a, b = (torch.randn(shape, generator=generator) for shape in ((2, inputs), (outputs, 2)))
        return (Part(a, b, 0),)

    hidden, heads = config.hidden_size, config.num_heads * config.head_dim
    layer = {"qkv": part(hidden, heads), "down": part(config.intermediate_size, hidden)}
    return Adapter((layer,) * config.num_layers)


@pytest.fixture(scope="module")
def adapted(executor):
    executor.load_adapter("one", adapter_of(executor.model_config))
    return executor


def row_of(name, token, start, table, *, adapter=None, banned=(), kind="decode"):
    spec = SampleSpec(GREEDY, 0, banned)
    return Row(RequestId(name), kind, [token], start, list(table), spec, adapter)


def token_ids(step):
    result = result_of(step)
    assert not result.errors
    return {name: token.token_id for name, token in result.tokens.items()}


def test_adapters_and_pending_tokens_pass_between_both_kinds_of_steps(adapted, folder, prompts):
    plain = load(folder)
    plain.load_adapter("one", adapter_of(plain.model_config))
    blocks = {"a": range(6), "b": range(10, 16)}
    wanted = {}
    for name, adapter in (("a", "one"), ("b", None)):
        driver, sequence = Driver(plain), Sequence_(name, prompts[2], blocks[name])
        while len(sequence.output) < 4:
            row = sequence.row()
            row.adapter = adapter
            result = plain.step(StepPlan(driver.step_count, (row,)))
            driver.step_count += 1
            sequence.computed += len(row.token_ids)
            sequence.tokens.append(result.tokens[sequence.name].token_id)
        wanted[name] = sequence.output
    assert wanted["a"] != wanted["b"], "the adapter does nothing"

    prompt, end = prompts[2], len(prompts[2])
    chunks = [
        Row(RequestId(n), "prefill", list(prompt), 0, list(blocks[n]), SampleSpec(GREEDY, 0), a)
        for n, a in (("a", "one"), ("b", None))
    ]
    first = token_ids(adapted.step(StepPlan(0, tuple(chunks))))
    # a: an adapter, so one by one. b: alone in a graph, beside a not, alone again.
    running = [
        adapted.step(StepPlan(1, (row_of("b", first["b"], end, blocks["b"]),))),
        adapted.step(
            StepPlan(
                2,
                (
                    row_of("a", first["a"], end, blocks["a"], adapter="one"),
                    row_of("b", PENDING, end + 1, blocks["b"]),
                ),
                behind=1,
            )
        ),
        adapted.step(
            StepPlan(
                3,
                (
                    row_of("b", PENDING, end + 2, blocks["b"]),
                    row_of("a", PENDING, end + 1, blocks["a"], adapter="one"),
                ),
                behind=2,
            )
        ),
        adapted.step(
            StepPlan(4, (row_of("a", PENDING, end + 2, blocks["a"], adapter="one"),), behind=3)
        ),
    ]
    assert not any(isinstance(step, StepResult) for step in running)
    found = {name: [token] for name, token in first.items()}
    for step in running:
        for name, token in token_ids(step).items():
            found[name].append(token)
    assert found == wanted


def test_a_step_in_a_graph_goes_on_from_one_without(adapted, prompts, expected):
    prompt, table = prompts[0], range(20, 24)
    end = len(prompt)
    chunk = Row(RequestId("b"), "prefill", list(prompt), 0, list(table), SampleSpec(GREEDY, 0))
    beside = Row(RequestId("x"), "decode", [1], 0, [30], SampleSpec(GREEDY, 0), "one")
    first = adapted.step(StepPlan(0, (beside, chunk)))
    second = adapted.step(StepPlan(1, (row_of("b", PENDING, end, table),), behind=0))
    assert not isinstance(first, StepResult)
    tokens = [token_ids(first)["b"], token_ids(second)["b"]]
    assert tokens == expected[0][:2]


@torch.inference_mode()
def marked(executor):
    """The pool, filled. Not with NaN: a row that is lost may read its own slot."""
    _, pool = executor._loaded
    for layer in pool.layers:
        for cache in layer:
            cache.fill_(MARK)
    return pool


def test_a_row_whose_token_never_came_ends_alone_and_writes_nothing(adapted):
    pool = marked(adapted)
    rows = (
        row_of("a", 1, 0, [1], banned=tuple(range(VOCAB)), adapter="one"),
        row_of("b", 2, 0, [2]),
    )
    first = adapted.step(StepPlan(0, rows))
    behind = (
        row_of("a", PENDING, 1, [1], adapter="one"),
        row_of("b", PENDING, 1, [2]),
        row_of("stranger", PENDING, 0, [3]),
    )
    second = result_of(adapted.step(StepPlan(1, behind, behind=0)))
    assert result_of(first).errors == {"a": "every token is banned or unowned"}
    missing = "the step before gave it no token"
    assert second.errors == {"a": missing, "stranger": missing}
    assert second.tokens.keys() == {"b"}
    for layer in pool.layers:
        for cache in layer:
            written = (cache != MARK).any(dim=2).any(dim=0).nonzero().flatten()
            assert written.tolist() == [4, 8, 9], "a's first, b's both"


def test_a_step_behind_another_than_the_last_takes_nothing_from_it(adapted):
    marked(adapted)
    adapted.step(StepPlan(3, (row_of("a", 1, 0, [1], adapter="one"),)))
    late = adapted.step(StepPlan(9, (row_of("a", PENDING, 1, [1], adapter="one"),), behind=2))
    assert result_of(late).errors == {"a": "the step before gave it no token"}


def test_dropped_rows_and_bad_rows_leave_the_others_alone(adapted):
    gone = row_of("gone", 1, 0, [1], adapter="one")
    gone.dropped = True
    assert token_ids(adapted.step(StepPlan(0, (gone, row_of("b", 2, 0, [2]))))).keys() == {"b"}
    empty = result_of(adapted.step(StepPlan(1, (gone,))))
    assert not empty.tokens
    assert not empty.errors
    bad = row_of("bad", VOCAB, 0, [1], adapter="one")
    with pytest.raises(ValueError, match=f"token id {VOCAB} is out of range"):
        adapted.step(StepPlan(2, (bad,)))
    assert token_ids(adapted.step(StepPlan(3, (row_of("b", 2, 0, [2]),)))).keys() == {"b"}


def test_logprobs_are_those_of_the_plain_executor(adapted, folder, prompts):
    plain = load(folder)
    sampling = Sampling(temperature=0.8, top_k=20, top_p=0.9, seed=7, logprobs=3)
    row = Row(
        RequestId("a"), "prefill", list(prompts[3]), 0, list(range(5)), SampleSpec(sampling, 2)
    )
    wanted = result_of(plain.step(StepPlan(0, (row,)))).tokens["a"]
    found = result_of(adapted.step(StepPlan(0, (row,)))).tokens["a"]
    assert found.token_id == wanted.token_id
    assert found.logprob == pytest.approx(wanted.logprob, abs=1e-4)
    assert [i for i, _ in found.top_logprobs] == [i for i, _ in wanted.top_logprobs]


def test_a_chunk_that_samples_nothing_is_waited_for(adapted, prompts):
    row = Row(RequestId("a"), "prefill", list(prompts[0]), 0, [0, 1, 2, 3], None)
    assert adapted.step(StepPlan(0, (row,))) == StepResult({})


def test_a_closed_executor_refuses_both_kinds_of_steps(folder):
    executor = load_on_kernels(folder)
    executor.close()
    for row in (row_of("a", 1, 0, [1]), row_of("a", 1, 0, [1], kind="prefill")):
        with pytest.raises(RuntimeError, match="the executor is closed"):
            executor.step(StepPlan(0, (row,)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernels_pass_the_trial_of_a_model_that_loads(executor, dtype):
    config = executor.model_config
    shape = (config.num_heads, config.num_kv_heads, config.head_dim, config.rms_norm_eps)
    plain, kernels = TorchOperators(*shape), CudaOperators(*shape)
    assert find_fault(kernels, plain, config, dtype, DEVICE) is None
    wrong = CudaOperators(*shape[:3], 0.5)
    fault = find_fault(wrong, plain, config, dtype, DEVICE)
    assert fault is not None
    assert fault.startswith("norm: off by ")


def test_decode_goes_on_without_graphs_where_they_cannot_be_captured(
    executor, monkeypatch, caplog, prompts, expected
):
    class Refuses:
        def __call__(self, run):
            raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(steps, "GraphCapture", Refuses)
    model, pool = executor._loaded
    with torch.inference_mode(), caplog.at_level(logging.WARNING, "qwen3_asgi"):
        opened = steps.open_steps(
            model,
            pool,
            executor.model_config,
            executor._sampler.unowned,
            max_batch=2,
            max_tokens=executor.max_context_tokens,
        )
    [record] = caplog.records
    assert "CUDA graphs: not used" in record.getMessage()
    assert "not permitted" in record.getMessage()
    assert opened is not None
    monkeypatch.setattr(executor, "_cuda", opened)
    prompt = prompts[0]
    sequence = Sequence_("a", prompt, range(40, 44))
    Driver(executor).run(sequence, 2)
    assert sequence.output == expected[0][:2]


def test_a_step_under_stopwatches_runs_without_graphs_and_the_next_with_them(executor):
    cuda, row = executor._cuda, row_of("a", 1, 0, [1])
    with split(executor) as watches:
        step = executor.step(StepPlan(0, (row,)))
        assert isinstance(step, StepResult)
        assert all(watches.take().values())
    assert executor._cuda is cuda
    assert token_ids(executor.step(StepPlan(1, (row,)))) == token_ids(step)


def test_operators_in_one_order_run_without_graphs(executor):
    config = executor.model_config
    model, pool = executor._loaded
    shape = (config.num_heads, config.num_kv_heads, config.head_dim, config.rms_norm_eps)
    before, model.operators = model.operators, CudaOperators(*shape, one_order=True)
    try:
        unowned = executor._sampler.unowned
        assert steps.open_steps(model, pool, config, unowned, max_batch=2, max_tokens=64) is None
    finally:
        model.operators = before
