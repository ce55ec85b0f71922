"""Memory of a card, batch buckets, and the choice of an attention: decided by plain functions."""

from __future__ import annotations

import pytest
import torch

from qwen3_asgi.config import EngineConfig
from qwen3_asgi.errors import ModelLoadError
from qwen3_asgi.model import memory
from qwen3_asgi.model.cuda import varlen
from qwen3_asgi.model.cuda.capacity import (
    CardMemory,
    buckets,
    card_memory,
    pool_budget,
    step_bytes,
)
from qwen3_asgi.model.kv import LayerKV, bytes_per_block
from qwen3_asgi.model.shapes import named_shape

GIB = 2**30


@pytest.mark.parametrize(
    ("free", "reclaimable", "utilization", "gib"),
    [
        (70, 0, 0.9, 61),  # weights alone on the card: a tenth of it stays free
        (30, 0, 0.9, 21),  # a neighbour holds 40 GiB: they are not ours to count on
        (30, 5, 0.9, 26),  # what torch keeps for nothing can be had
        (10, 0, 1.0, 9),  # steps need room, whatever was asked for
        (70, 0, 0.5, 29),
    ],
)
def test_a_pool_takes_what_is_left_below_the_limit(free, reclaimable, utilization, gib):
    card = CardMemory(free * GIB, 80 * GIB, reclaimable * GIB)
    assert pool_budget(card, utilization, reserve_bytes=GIB) == gib * GIB


@pytest.mark.parametrize("utilization", [0.0, -1.0, 1.01, float("nan")])
def test_a_limit_out_of_range_is_refused(utilization):
    with pytest.raises(
        ValueError,
        match=(f"gpu_memory_utilization must be greater than 0 and at most 1, got {utilization}"),
    ):
        EngineConfig(gpu_memory_utilization=utilization)
    assert EngineConfig(gpu_memory_utilization=1).gpu_memory_utilization == 1


@pytest.mark.parametrize(("free", "utilization"), [(7, 0.9), (9, 0.9), (50, 0.3)])
def test_a_card_with_nothing_left_is_refused_with_all_numbers(free, utilization):
    card = CardMemory(free * GIB, 80 * GIB, 0)
    with pytest.raises(ModelLoadError) as error:
        pool_budget(card, utilization, reserve_bytes=GIB)
    assert str(error.value) == (
        f"gpu_memory_utilization={utilization} allows {80 * utilization:.2f} of the card's "
        f"80.00 GiB; {80 - free:.2f} GiB are in use, the model's weights included, and steps need "
        "1.00 GiB: nothing is left for the KV pool"
    )


def test_more_tokens_and_more_rows_need_more_room_for_steps():
    config = named_shape("Qwen3-4B")

    def needed(**settings):
        return step_bytes(config, EngineConfig(**settings), 40_960, torch.bfloat16)

    usual = needed()
    # Of logits alone: 32 rows of 151,936, as float32 and as float64 weights with their sums.
    assert 32 * 151_936 * 20 < usual < 2 * GIB
    assert needed(max_batch=256) > usual + 224 * 151_936 * 20
    # What is widest of a prompt's rows are the two halves of the MLP.
    assert needed(max_prefill_tokens=8192) > usual + (8192 - 512) * 2 * 9728 * 2


def test_the_pool_of_a_card_is_what_the_setting_leaves(monkeypatch):
    config = named_shape("Qwen3-4B")
    monkeypatch.setattr(memory, "card_memory", lambda device: CardMemory(70 * GIB, 80 * GIB, 0))

    def blocks(**settings):
        settings = EngineConfig(device="cuda", max_batch=64, **settings)
        return memory.pool_blocks(config, settings, 40_960, torch.bfloat16, "cuda:0")

    block = bytes_per_block(config, 16, torch.bfloat16)
    more = blocks(gpu_memory_utilization=0.9) - blocks(gpu_memory_utilization=0.5)
    assert abs(more - 32 * GIB // block) <= 1
    assert blocks(num_kv_blocks=7, gpu_memory_utilization=0.01) == 7


def test_a_card_without_a_number_is_the_one_that_is_current(monkeypatch):
    """On the loading thread; another thread's current one may be another."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    for name in ("auto", "cuda"):
        assert memory.choose_device(name) == torch.device("cuda:1")
    assert memory.choose_device("cuda:0") == torch.device("cuda:0")


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
