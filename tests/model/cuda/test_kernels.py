"""Each kernel against plain torch, in Triton's interpreter where there is no CUDA device."""

from __future__ import annotations

import pytest
import torch

from qwen3_asgi.model.cuda import rows as kernels
from qwen3_asgi.model.cuda.attention import lay_out, paged_attention
from qwen3_asgi.model.cuda.operators import CudaOperators
from qwen3_asgi.model.kv import LayerKV
from qwen3_asgi.model.operators import TorchOperators, rms_norm
from qwen3_asgi.model.rope import RotaryTable
from qwen3_asgi.model.rope_config import RopeConfig
from tests.model.cuda.world import (
    DEVICE,
    DTYPES,
    batch_of,
    close,
    expected_attention,
    needs_kernels,
    random,
    random_kv,
    sequences,
)

EPS = 1e-6

pytestmark = needs_kernels


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "width"), [(1, 64), (3, 1024), (5, 2560)])
def test_norms_are_those_of_the_plain_operators(dtype, tokens, width):
    x, delta = (random(tokens, width, dtype=dtype, seed=s) for s in (1, 2))
    weight = random(width, dtype=dtype, seed=3)
    close(kernels.norm(x, weight, EPS), rms_norm(x, weight, EPS))

    total = x + delta
    normed = kernels.add_norm(x, delta, weight, EPS)
    close(x, total)  # not equal: the interpreter cuts bfloat16 off where hardware rounds
    close(normed, rms_norm(total, weight, EPS))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [48, 1024, 3072])
def test_gated_activation_is_that_of_the_plain_operators(dtype, width):
    fused = random(3, 2 * width, dtype=dtype, seed=1) * 3
    close(kernels.silu_mul(fused), TorchOperators(1, 1, 64, EPS).silu_mul(fused.clone()))


def run_layer(operators, batch, fused, weight, kv, table):
    cos, sin = table.lookup(batch.positions, batch.last_position)
    return operators.attention(batch, cos, sin)(fused, weight, kv)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_heads", "kv_heads", "dim"), [(4, 2, 64), (5, 1, 128), (2, 2, 64)])
def test_a_layers_attention_is_that_of_the_plain_operators(dtype, num_heads, kv_heads, dim):
    rows, num_blocks = sequences([(40, 1), (0, 1), (0, 9), (17, 5)], 16)
    paged, plain = (batch_of(rows, num_blocks, 16, paged=p) for p in (True, False))
    tokens = len(paged.token_ids)
    fused = random(tokens, (num_heads + 2 * kv_heads) * dim, dtype=dtype, seed=5)
    weight = random(num_heads + kv_heads, dim, dtype=dtype, seed=6)
    kv = random_kv(kv_heads, num_blocks * 16, dim, dtype)
    wanted_kv = LayerKV(*(c.clone() for c in kv))
    table = RotaryTable(RopeConfig(theta=1e6, yarn=None), dim, DEVICE)
    shape = (num_heads, kv_heads, dim, EPS)

    wanted = run_layer(TorchOperators(*shape), plain, fused.clone(), weight, wanted_kv, table)
    found = run_layer(CudaOperators(*shape), paged, fused, weight, kv, table)

    close(kv.keys, wanted_kv.keys)
    assert torch.equal(kv.values, wanted_kv.values)
    close(found, wanted)


def attention(queries, kv, rows, num_blocks, block_size):
    batch = batch_of(rows, num_blocks, block_size)
    num_heads = queries.shape[1]
    layout = lay_out(batch.last_rows, batch.last_position, num_heads // len(kv.keys), DEVICE)
    flat = queries.reshape(len(queries), -1)
    out = torch.full_like(flat, float("nan"))
    paged_attention(flat, kv, batch.paged, layout, out, num_heads=num_heads)
    return out.view_as(queries)


@pytest.mark.parametrize("slots_first", [False, True])
@pytest.mark.parametrize("block_size", [1, 16, 48])
@pytest.mark.parametrize(
    "spans",
    [
        [(0, 1)],
        [(511, 1), (512, 1), (1100, 1), (3, 1)],
        [(5, 1), (0, 40), (70, 33), (63, 1)],
        [(0, 2)],
    ],
)
def test_attention_over_scattered_blocks(spans, block_size, slots_first):
    rows, num_blocks = sequences(spans, block_size)
    kv = random_kv(2, num_blocks * block_size, 64, torch.float32, slots_first=slots_first)
    queries = random(sum(n for _, n in spans), 6, 64, dtype=torch.float32, seed=4)
    found = attention(queries, kv, rows, num_blocks, block_size)
    close(found, expected_attention(queries, kv, rows, block_size))


def test_slots_beyond_a_sequence_are_never_read():
    rows, num_blocks = sequences([(9, 1), (3, 7)], 16)
    kv = random_kv(1, num_blocks * 16, 64, torch.float32)
    queries = random(8, 2, 64, dtype=torch.float32, seed=4)
    wanted = expected_attention(queries, kv, rows, 16)
    held = {r.block_table[0] * 16 + p for r in rows for p in range(10)}
    for cache in kv:
        cache[:, [slot for slot in range(num_blocks * 16) if slot not in held]] = float("nan")
    close(attention(queries, kv, rows, num_blocks, 16), wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rows_attention_does_not_depend_on_its_batch(dtype):
    spans = [(600, 1), (20, 1), (1100, 1), (30, 9)]
    rows, num_blocks = sequences(spans, 16)
    kv = random_kv(2, num_blocks * 16, 64, dtype)
    queries = random(12, 4, 64, dtype=dtype, seed=4)
    together = attention(queries, kv, rows, num_blocks, 16)
    first = 0
    for row in rows:
        own = slice(first, first + len(row.token_ids))
        assert torch.equal(attention(queries[own], kv, [row], num_blocks, 16), together[own])
        first = own.stop


def test_a_row_without_a_slot_writes_nothing_and_reads_nothing():
    rows, num_blocks = sequences([(4, 1), (6, 1)], 16)
    batch = batch_of(rows, num_blocks, 16)
    batch.slots[1] = -1
    batch.paged.spans[1, 2] = -1
    # One slot more in front, where slot -1 would be.
    whole = random_kv(1, num_blocks * 16 + 1, 64, torch.float32)
    kv = LayerKV(*(c[:, 1:] for c in whole))
    before = LayerKV(*(c.clone() for c in whole))
    fused = random(2, 4 * 64, dtype=torch.float32, seed=5)
    weight = torch.ones(3, 64, device=DEVICE)
    table = RotaryTable(RopeConfig(theta=1e6, yarn=None), 64, DEVICE)
    out = run_layer(CudaOperators(2, 1, 64, EPS), batch, fused, weight, kv, table)
    for cache, old in zip(whole, before, strict=True):
        changed = (cache != old).any(dim=(0, 2)).nonzero().flatten().tolist()
        assert changed == [1 + rows[0].block_table[0] * 16 + 4]
    assert torch.equal(out[1], torch.zeros(128, device=DEVICE))
    assert bool(out[0].abs().sum() > 0)


def test_values_laid_out_unlike_keys_are_refused():
    rows, num_blocks = sequences([(4, 1)], 16)
    kv = random_kv(2, num_blocks * 16, 64, torch.float32)
    other = random_kv(2, num_blocks * 16, 64, torch.float32, slots_first=True)
    queries = random(1, 4, 64, dtype=torch.float32, seed=4)
    with pytest.raises(ValueError, match="strides differ"):
        attention(queries, LayerKV(kv.keys, other.values), rows, num_blocks, 16)
