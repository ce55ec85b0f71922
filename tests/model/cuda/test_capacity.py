"""Memory of a card, batch buckets, and the choice of an attention: decided by plain functions."""

from __future__ import annotations

import pytest
import torch

from qwen3_asgi.model.cuda import varlen
from qwen3_asgi.model.cuda.capacity import CardMemory, buckets, card_memory, pool_budget
from qwen3_asgi.model.kv import LayerKV

GIB = 2**30


@pytest.mark.parametrize(
    ("free", "reclaimable", "utilization", "gib"),
    [
        (70, 0, 0.9, 62),  # weights alone on the card: a tenth of it stays free
        (30, 0, 0.9, 22),  # a neighbour holds 40 GiB: they are not ours to count on
        (30, 5, 0.9, 27),  # what torch keeps for nothing can be had
        (7, 0, 0.9, 0),  # others use more than the limit already
        (10, 0, 1.0, 9),  # steps need room, whatever was asked for
    ],
)
def test_a_pool_takes_what_is_free_below_the_limit(free, reclaimable, utilization, gib):
    memory = CardMemory(free * GIB, 80 * GIB, reclaimable * GIB)
    assert pool_budget(memory, utilization, workspace_bytes=GIB) // GIB == gib


@pytest.mark.parametrize("utilization", [0.0, -1.0, 1.01, float("nan")])
def test_a_limit_out_of_range_is_refused(utilization):
    with pytest.raises(ValueError, match=r"gpu_memory_utilization must be in \(0, 1\], got"):
        pool_budget(CardMemory(1, 1, 0), utilization)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_unused_memory_of_torch_counts_as_available():
    device = torch.device("cuda")
    held = torch.empty(GIB, dtype=torch.uint8, device=device)
    before = card_memory(device)
    del held
    after = card_memory(device)
    assert after.free + after.reclaimable >= before.free + before.reclaimable + GIB


def test_buckets_double_up_to_the_largest_batch():
    assert buckets(1) == (1,)
    assert buckets(8) == (1, 2, 4, 8)
    assert buckets(48) == (1, 2, 4, 8, 16, 32, 48)
    with pytest.raises(ValueError, match="max_batch must be at least 1, got 0"):
        buckets(0)


def modern(query, key, value, *, window_size, enable_gqa, seqused_k, block_table, num_splits):
    return query


def dated(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False):
    return query


def test_a_varlen_attention_without_block_tables_is_not_used():
    assert varlen.reads_block_tables(modern)
    assert not varlen.reads_block_tables(dated)
    assert not varlen.reads_block_tables(type)


def test_a_torch_without_varlen_attention_is_no_error(monkeypatch):
    def absent(name):
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(varlen, "import_module", absent)
    assert varlen.find_varlen() is None


def test_a_varlen_attention_is_used_only_if_its_trial_is_right():
    right, wrong = torch.ones(3), torch.zeros(3)

    def refuses(function):
        raise RuntimeError("page size must be a multiple of 256")

    assert varlen.choose_varlen(modern, lambda _: (right, right)) is modern
    assert varlen.choose_varlen(modern, lambda _: (wrong, right)) is None
    assert varlen.choose_varlen(modern, refuses) is None
    assert varlen.choose_varlen(None, lambda _: (right, right)) is None


def test_pages_are_views_of_the_pool():
    kv = LayerKV(*(torch.arange(2 * 12 * 4).view(2, 12, 4) + i for i in (0, 1000)))
    keys, values = varlen.pages(kv, 4)
    assert keys.shape == (3, 4, 2, 4)
    assert torch.equal(keys[2, 1, 1], kv.keys[1, 9])
    assert torch.equal(values[1, 3, 0], kv.values[0, 7])
    assert keys.data_ptr() == kv.keys.data_ptr()
