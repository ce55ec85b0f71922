"""torch's paged attention in place of our kernel: given what it asks for, and only if it is right.

It runs on cards alone, so elsewhere a function of the same signature stands in, in plain torch.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from qwen3_asgi.model.cuda.operators import CudaOperators
from qwen3_asgi.model.cuda.steps import _varlen
from qwen3_asgi.model.cuda.varlen import chunks_of, find_varlen
from qwen3_asgi.model.kv import KVPool
from qwen3_asgi.model.operators import TorchOperators
from qwen3_asgi.model.rope import RotaryTable
from qwen3_asgi.model.rope_config import RopeConfig
from qwen3_asgi.model.shapes import named_shape
from tests.model.cuda.executors import needs_card
from tests.model.cuda.world import (
    DEVICE,
    batch_of,
    close,
    needs_kernels,
    random,
    random_kv,
    sequences,
)

EPS = 1e-6
BLOCK = 16
HEADS, KV_HEADS, DIM = 4, 2, 64


def stand_in(
    query,
    key,
    value,
    cu_seq_q,
    cu_seq_k,
    max_q,
    max_k,
    *,
    window_size,
    enable_gqa,
    seqused_k,
    block_table,
    num_splits,
):
    """`varlen_attn` as its documentation has it, one sequence after the other."""
    assert cu_seq_k is None
    assert window_size == (-1, 0)
    assert enable_gqa
    assert num_splits == 1
    assert {t.dtype for t in (cu_seq_q, seqused_k, block_table)} == {torch.int32}
    assert query.stride(-1) == key.stride(-1) == value.stride(-1) == 1
    ends, used = cu_seq_q.tolist(), seqused_k.tolist()
    assert len(ends) == len(used) + 1 == len(block_table) + 1
    assert max(b - a for a, b in pairwise(ends)) == max_q
    assert max(used) <= max_k <= block_table.shape[1] * key.shape[1]
    out = torch.empty_like(query)
    group = query.shape[1] // key.shape[2]
    for (begin, end), held, table in zip(pairwise(ends), used, block_table, strict=True):
        keys, values = (
            cache[table.long()].flatten(0, 1)[:held].repeat_interleave(group, dim=1).transpose(0, 1)
            for cache in (key, value)
        )
        length = end - begin
        seen = torch.ones(length, held, dtype=torch.bool, device=query.device).tril(held - length)
        logits = query[begin:end].transpose(0, 1).float() @ keys.float().transpose(1, 2)
        weights = (logits * DIM**-0.5).masked_fill(~seen, float("-inf")).softmax(-1)
        out[begin:end] = (weights @ values.float()).transpose(0, 1).to(query.dtype)
    return out


def layer(operators, rows, num_blocks, dtype):
    batch = batch_of(rows, num_blocks, BLOCK, paged=operators.reads_tables)
    tokens = len(batch.token_ids)
    fused = random(tokens, (HEADS + 2 * KV_HEADS) * DIM, dtype=dtype, seed=5)
    weight = random(HEADS + KV_HEADS, DIM, dtype=dtype, seed=6)
    kv = random_kv(KV_HEADS, num_blocks * BLOCK, DIM, dtype)
    table = RotaryTable(RopeConfig(theta=1e6, yarn=None), DIM, DEVICE)
    cos, sin = table.lookup(batch.positions, batch.last_position)
    return operators.attention(batch, cos, sin)(fused, weight, kv)


@needs_kernels
@pytest.mark.parametrize(
    "spans",
    [
        [(40, 1), (0, 1), (0, 9), (17, 5)],
        [(0, 3)],
        [(33, 1), (2, 2), (50, 1)],  # a chunk of one token behind a longer one
        [(5, 1), (20, 1)],  # no chunk
    ],
)
def test_chunks_by_varlen_attention_beside_decode_rows_in_our_kernels(spans):
    rows, num_blocks = sequences(spans, BLOCK)
    shape = (HEADS, KV_HEADS, DIM, EPS)
    operators = CudaOperators(*shape)
    calls = []

    def counted(*arguments, **named):
        calls.append(arguments)
        return stand_in(*arguments, **named)

    operators.varlen = counted
    found = layer(operators, rows, num_blocks, torch.float32)
    assert len(calls) == any(length > 1 for _, length in spans)
    close(found, layer(TorchOperators(*shape), rows, num_blocks, torch.float32))


def test_a_batch_without_block_tables_is_refused():
    rows, num_blocks = sequences([(0, 4)], BLOCK)
    batch = batch_of(rows, num_blocks, BLOCK, paged=False)
    with pytest.raises(ValueError, match="build the batch with paged=True"):
        chunks_of(batch, 0)


@needs_card
def test_a_card_takes_varlen_attention_only_if_it_agrees_with_our_kernels():
    config = named_shape("Qwen3-0.6B")
    pool = KVPool(config, 8, BLOCK, torch.bfloat16, DEVICE)
    operators = CudaOperators(
        config.num_heads, config.num_kv_heads, config.head_dim, config.rms_norm_eps
    )
    with torch.inference_mode():
        found = _varlen(operators, config, pool)
    assert operators.varlen is None, "what was on trial stayed"
    assert found is None or found is find_varlen()
