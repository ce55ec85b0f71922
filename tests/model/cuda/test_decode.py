"""Pipelined decode on static buffers; graphs are replaced by plain calls where there is no CUDA."""

from __future__ import annotations

import pytest
import torch

from qwen3_asgi.model.batch import build_batch
from qwen3_asgi.model.checkpoint import Checkpoint
from qwen3_asgi.model.config import load_model_config
from qwen3_asgi.model.cuda.attention import PIECE_TOKENS
from qwen3_asgi.model.cuda.decode import CudaDecode, piece_buckets, smallest
from qwen3_asgi.model.cuda.graphs import GraphCapture
from qwen3_asgi.model.cuda.inputs import DecodeInputs
from qwen3_asgi.model.cuda.operators import CudaOperators
from qwen3_asgi.model.kv import KVPool
from qwen3_asgi.model.qwen3 import Qwen3
from qwen3_asgi.model.weights import load_weights
from qwen3_asgi.scheduler.plan import PENDING, RequestId, Row, SampleSpec, Sampling, StepPlan
from tests.model.checkpoints import VOCAB, greedy, load_reference, write_checkpoint
from tests.model.cuda.world import DEVICE, needs_kernels

BLOCK = 4
NUM_BLOCKS = 32
MAX_BATCH = 4
GREEDY = Sampling(temperature=0.0)
EVERY_ID = tuple(range(VOCAB))


def inputs_of(max_tokens=256, **settings):
    shape = {"max_batch": MAX_BATCH, "block_size": BLOCK, "num_blocks": NUM_BLOCKS}
    return DecodeInputs(
        max_tokens=max_tokens, vocab_size=VOCAB, device=DEVICE, **(shape | settings)
    )


def decode_row(name, token, start, table, *, banned=(), sampling=GREEDY):
    spec = SampleSpec(sampling, 0, banned)
    return Row(RequestId(name), "decode", [token], start, list(table), spec)


def decode_of(forward, inputs=None, max_tokens=256, capture=lambda run: run):
    decode = CudaDecode(
        forward,
        inputs or inputs_of(max_tokens),
        max_batch=MAX_BATCH,
        max_tokens=max_tokens,
        vocab_size=VOCAB,
        unowned=torch.tensor([VOCAB - 1], device=DEVICE),
        capture=capture,
    )
    decode.start()
    return decode


def successor(batch):
    """Logits whose best token is the input's successor."""
    return torch.nn.functional.one_hot((batch.token_ids + 1) % VOCAB, VOCAB).float()


def token_ids(result):
    return {request_id: token.token_id for request_id, token in result.tokens.items()}


class Recorder:
    """A forward that remembers what it was given."""

    def __init__(self):
        self.seen = []

    def __call__(self, batch):
        spans = batch.paged.spans
        self.seen.append(
            (
                batch.token_ids.tolist(),
                batch.positions.tolist(),
                batch.slots.tolist(),
                spans.tolist(),
                batch.paged.tables.tolist(),
            )
        )
        return successor(batch)


def test_rows_are_laid_out_for_the_kernels_and_padding_writes_nowhere():
    forward = Recorder()
    decode = decode_of(forward, max_tokens=16)
    rows = (
        decode_row("a", 11, 6, [5, 9]),
        decode_row("b", 12, 0, [7]),
        decode_row("c", 13, 8, [1, 2, 3, 30]),
    )
    result = decode.step(StepPlan(0, rows)).result()
    assert token_ids(result) == {"a": 12, "b": 13, "c": 14}
    ids, positions, slots, spans, tables = forward.seen[-1]
    assert ids == [11, 12, 13, 0]
    assert positions == [6, 0, 8, 0]
    assert slots == [9 * 4 + 2, 7 * 4, 3 * 4, -1]
    assert spans == [[0, 1, 6, 0], [1, 1, 0, 4], [2, 1, 8, 8], [3, 1, -1, 0]]
    assert tables[0:2] == [5, 9]
    assert tables[4] == 7
    assert tables[8:11] == [1, 2, 3]


def test_a_pending_token_is_taken_from_the_step_before_wherever_its_row_was():
    decode = decode_of(successor)
    a, b, c = (
        decode_row(n, t, 3, [i]) for i, (n, t) in enumerate([("a", 10), ("b", 20), ("c", 30)])
    )
    first = decode.step(StepPlan(0, (a, b, c)))
    rows = (
        decode_row("c", PENDING, 4, [2, 5]),
        decode_row("new", 70, 1, [8]),
        decode_row("a", PENDING, 4, [0, 6]),
    )
    second = decode.step(StepPlan(1, rows, behind=0))
    assert token_ids(first.result()) == {"a": 11, "b": 21, "c": 31}
    assert token_ids(second.result()) == {"c": 32, "new": 71, "a": 12}


def test_a_row_whose_token_never_came_ends_alone_and_writes_nothing():
    forward = Recorder()
    decode = decode_of(forward)
    rows = (decode_row("a", 1, 0, [1], banned=EVERY_ID), decode_row("b", 2, 0, [2]))
    first = decode.step(StepPlan(0, rows))
    behind = (
        decode_row("a", PENDING, 1, [1]),
        decode_row("b", PENDING, 1, [2]),
        decode_row("stranger", PENDING, 1, [3]),
    )
    second = decode.step(StepPlan(1, behind, behind=0))
    assert first.result().errors == {"a": "every token is banned or unowned"}
    result = second.result()
    missing = "the step before gave it no token"
    assert token_ids(result) == {"b": 4}
    assert result.errors == {"a": missing, "stranger": missing}
    assert forward.seen[-1][2] == [-1, 2 * 4 + 1, -1, -1]


def test_a_step_behind_another_than_the_last_takes_nothing_from_it():
    decode = decode_of(successor)
    decode.step(StepPlan(3, (decode_row("a", 1, 0, [1]),)))
    step = decode.step(StepPlan(9, (decode_row("a", PENDING, 1, [1]),), behind=2))
    assert step.result().errors == {"a": "the step before gave it no token"}


def test_dropped_rows_are_left_out():
    decode = decode_of(successor)
    gone = decode_row("gone", 1, 0, [1])
    gone.dropped = True
    result = decode.step(StepPlan(0, (gone, decode_row("b", 2, 0, [2])))).result()
    assert token_ids(result) == {"b": 3}
    assert not result.errors
    empty = decode.step(StepPlan(1, (gone,)))
    assert not empty.tokens
    assert not empty.errors


def test_a_table_that_changed_within_is_written_anew():
    forward = Recorder()
    decode = decode_of(forward, max_tokens=16)
    # Both host copies see the first tables, then both see the change.
    for step, table in enumerate([[1, 2], [1, 2, 3], [1, 2, 3], [4, 2, 3], [4, 9, 3], [4]]):
        start = BLOCK * len(table) - 1
        decode.step(StepPlan(step, (decode_row("a", 1, start, table),))).result()
        assert forward.seen[-1][4][: len(table)] == table


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (decode_row("a", 1, 0, [NUM_BLOCKS]), "block id 32 is out of range, valid are 0 to 31"),
        (decode_row("a", 1, 4, [-1, 2]), "block id -1 is out of range"),
        (decode_row("a", VOCAB, 0, [1]), "token id 320 is out of range, valid are 0 to 319"),
        (decode_row("a", -2, 0, [1]), "token id -2 is out of range"),
        (decode_row("a", 1, 4, [1]), "row a ends at token 5, its block table covers 4"),
        (decode_row("a", 1, 256, [1] * 65), "row a ends at token 257, the model holds at most 256"),
        (decode_row("a", 1, 9999, [1]), "row a ends at token 10000, the model holds at most 256"),
    ],
)
def test_a_row_that_cannot_be_run_is_refused_and_the_next_step_is_unharmed(row, message):
    decode = decode_of(successor)
    with pytest.raises(ValueError, match=message):
        decode.step(StepPlan(0, (decode_row("b", 1, 0, [3]), row)))
    result = decode.step(StepPlan(1, (decode_row("b", 5, 0, [3]),))).result()
    assert token_ids(result) == {"b": 6}


def test_buckets_cover_every_context_and_refuse_more():
    assert piece_buckets(100) == [1]
    assert piece_buckets(PIECE_TOKENS * 5 + 1) == [1, 4, 6]
    assert piece_buckets(40_960) == [1, 4, 16, 64, 80]
    assert [smallest((1, 2, 4), n) for n in (1, 2, 3, 4)] == [1, 2, 4, 4]
    with pytest.raises(ValueError, match="5 is more than the largest bucket, 4"):
        smallest((1, 2, 4), 5)


def test_the_graph_of_the_smallest_context_and_batch_is_replayed():
    runs = []

    def forward(batch):
        runs.append((len(batch.token_ids), batch.last_position))
        return successor(batch)

    decode = decode_of(forward, max_tokens=5000)
    assert runs == []  # this capture only binds
    for starts in ([0], [511], [512, 3, 3], [5, 4999]):
        rows = [decode_row(str(i), 1, s, [1] * (s // BLOCK + 1)) for i, s in enumerate(starts)]
        decode.step(StepPlan(0, tuple(rows))).result()
    assert runs == [(1, 511), (1, 511), (4, 2047), (2, 4999)]


def test_only_plain_decode_steps_are_taken():
    decode = decode_of(successor)
    row = decode_row("a", 1, 0, [1])
    adapted = decode_row("a", 1, 0, [1])
    adapted.adapter = "one"
    prefill = Row(RequestId("p"), "prefill", [1], 0, [1], None)
    assert decode.takes(StepPlan(0, (row,) * MAX_BATCH))
    assert not decode.takes(StepPlan(0, (row,) * (MAX_BATCH + 1)))
    assert not decode.takes(StepPlan(0, (adapted,)))
    assert not decode.takes(StepPlan(0, (row, prefill)))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("tied"), "tied", num_hidden_layers=2)


@needs_kernels
@pytest.mark.parametrize(
    "capture",
    [
        pytest.param(lambda: lambda run: run, id="plain"),
        pytest.param(
            GraphCapture,
            id="graphs",
            marks=[
                pytest.mark.cuda,
                pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
            ],
        ),
    ],
)
def test_pipelined_decode_continues_like_transformers(checkpoint, capture):
    config = load_model_config(checkpoint)
    prompts = {"a": [5, 17, 200, 31, 8, 44], "b": [90, 3], "c": [250, 9, 9, 61, 300]}
    blocks = {"a": [3, 11, 20, 4], "b": [7, 1, 30], "c": [15, 14, 2]}
    with torch.inference_mode():
        weights = load_weights(Checkpoint(checkpoint), config, torch.float32, DEVICE)
        operators = CudaOperators(
            config.num_heads, config.num_kv_heads, config.head_dim, config.rms_norm_eps
        )
        model = Qwen3(config, weights, operators)
        pool = KVPool(config, NUM_BLOCKS, BLOCK, torch.float32, DEVICE)
        for layer in pool.layers:
            for cache in layer:
                cache.fill_(float("nan"))
        # All but the last token of each prompt in one batch.
        rows = [
            Row(RequestId(n), "prefill", ids[:-1], 0, blocks[n], None) for n, ids in prompts.items()
        ]
        batch = build_batch(
            rows,
            vocab_size=VOCAB,
            block_size=BLOCK,
            num_blocks=NUM_BLOCKS,
            max_tokens=256,
            device=DEVICE,
            paged=True,
        )
        model.forward(batch, pool)
    decode = decode_of(lambda batch: model.logits(model.forward(batch, pool)), capture=capture())
    found = {name: [] for name in prompts}
    running = []
    for step in range(4):
        rows = tuple(
            decode_row(n, PENDING if step else ids[-1], len(ids) - 1 + step, blocks[n])
            for n, ids in prompts.items()
        )
        running.append(decode.step(StepPlan(step, rows, behind=step - 1 if step else None)))
        if len(running) == 2:  # the host reads one step later
            for name, token in token_ids(running.pop(0).result()).items():
                found[name].append(token)
    for name, token in token_ids(running.pop().result()).items():
        found[name].append(token)
    reference = load_reference(checkpoint)
    assert found == {name: greedy(reference, ids, 4) for name, ids in prompts.items()}
