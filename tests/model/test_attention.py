"""Attention against one masked softmax over the gathered keys, in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qwen3_asgi.model import attention
from qwen3_asgi.model import kv as kv_module
from qwen3_asgi.model.attention import (
    attend,
    merge,
    partial_attention,
    reference_attention,
)
from qwen3_asgi.model.batch import Segment
from qwen3_asgi.model.kv import LayerKV, Scattered, runs, stretches

HEADS, KV_HEADS, DIM, BLOCK, BLOCKS = 6, 2, 8, 4, 40
CPU = torch.device("cpu")


def naive(queries, keys, values, start):
    """`queries` [T, H, D] at positions start…; `keys` [start+T, K, D]."""
    keys = keys.double().repeat_interleave(HEADS // KV_HEADS, dim=1)
    values = values.double().repeat_interleave(HEADS // KV_HEADS, dim=1)
    logits = torch.einsum("thd,shd->hts", queries.double(), keys) / DIM**0.5
    positions = torch.arange(start, start + len(queries))
    masked = torch.arange(len(keys))[None, :] > positions[:, None]
    weights = logits.masked_fill(masked, float("-inf")).softmax(-1)
    return torch.einsum("hts,shd->thd", weights, values).reshape(len(queries), HEADS * DIM)


def run_batch(shapes, seed, dtype=torch.float32, *, one_by_one=False):
    """`shapes`: (start, length) per sequence, each in blocks of a random order."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(BLOCKS, generator=generator).tolist()
    cache = torch.full((2, KV_HEADS, BLOCKS * BLOCK, DIM), float("nan"), dtype=dtype)
    kv = LayerKV(cache[0], cache[1])
    segments, expected, fresh = [], [], []
    for start, length in shapes:
        end = start + length
        table, order = order[: -(-end // BLOCK)], order[-(-end // BLOCK) :]
        shape = (end, 2 * KV_HEADS + HEADS, DIM)
        qkv = torch.randn(shape, generator=generator).to(dtype)
        keys, values = qkv[:, :KV_HEADS], qkv[:, KV_HEADS : 2 * KV_HEADS]
        queries = qkv[start:, 2 * KV_HEADS :]
        slots = torch.tensor([table[p // BLOCK] * BLOCK + p % BLOCK for p in range(end)])
        kv.write(slots, keys, values)
        held = end if length == 1 else start
        read = runs(table, held, BLOCK) if one_by_one else stretches(table, held, BLOCK, CPU)
        segments.append(Segment(sum(len(f[0]) for f in fresh), length, read))
        fresh.append((queries, keys[start:], values[start:]))
        expected.append(naive(queries, keys, values, start))
    found = attend(*(torch.cat(part) for part in zip(*fresh, strict=True)), kv, segments)
    return found, torch.cat(expected)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(1, 9)), min_size=1, max_size=4),
    st.integers(0, 1000),
    st.booleans(),
)
def test_any_batch_equals_one_masked_softmax(shapes, seed, one_by_one):
    found, expected = run_batch(shapes, seed, one_by_one=one_by_one)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", [(119, 1), (100, 20)])
def test_scattered_and_one_by_one_are_the_same(shape, monkeypatch):
    copied = []
    original = kv_module._gather
    monkeypatch.setattr(
        kv_module, "_gather", lambda cache, held: copied.append(held) or original(cache, held)
    )
    found, expected = run_batch([shape], 3)
    assert isinstance(copied[0], Scattered)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)
    found, expected = run_batch([shape], 3, one_by_one=True)
    assert len(copied) == 2
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)


def test_bf16_keeps_its_precision():
    found, expected = run_batch([(30, 9), (25, 1), (0, 12)], 7, torch.bfloat16)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), expected, rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("causal", [False, True])
def test_the_reference_agrees_with_the_kernel(causal):
    queries, keys, values = torch.randn(3, 2, 3, 5, DIM)
    kernel = partial_attention(queries, keys, values, causal=causal)
    plain = reference_attention(queries, keys, values, causal=causal)
    torch.testing.assert_close(kernel.out, plain.out)
    torch.testing.assert_close(kernel.lse, plain.lse)


def test_other_devices_use_the_reference(monkeypatch):
    monkeypatch.setattr(attention, "reference_attention", lambda *args, **kw: "reference")
    meta = torch.empty(1, 1, 1, 4, device="meta")
    assert partial_attention(meta, meta, meta, causal=False) == "reference"


def test_merging_is_exact_when_one_part_outweighs_the_other():
    queries = torch.randn(1, 1, 1, DIM) * 30
    keys, values = torch.randn(1, 1, 8, DIM) * 30, torch.randn(1, 1, 8, DIM)
    whole = partial_attention(queries, keys, values, causal=False).out
    halves = [
        partial_attention(queries, keys[:, :, part], values[:, :, part], causal=False)
        for part in (slice(0, 3), slice(3, 8))
    ]
    torch.testing.assert_close(merge(halves), whole)
