from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from qwen3_asgi.model.config import ModelConfig
from qwen3_asgi.model.kv import KVPool, Run, Scattered, bytes_per_block, runs, stretches
from qwen3_asgi.model.rope_config import RopeConfig

CONFIG = ModelConfig(
    vocab_size=10,
    hidden_size=8,
    intermediate_size=8,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    rms_norm_eps=1e-6,
    max_position_embeddings=64,
    tie_word_embeddings=True,
    rope=RopeConfig(1e4),
    dtype=None,
    eos_token_ids=(),
)


def test_neighbouring_blocks_become_one_run():
    assert runs([5, 6, 7], 12, 4) == (Run(20, 12),)
    assert runs([5, 6, 7], 10, 4) == (Run(20, 10),)


def test_blocks_in_other_orders_stay_apart():
    assert runs([7, 6], 8, 4) == (Run(28, 4), Run(24, 4))
    assert runs([1, 2, 9, 3], 16, 4) == (Run(4, 8), Run(36, 4), Run(12, 4))


def test_blocks_beyond_the_tokens_are_left_out():
    assert runs([1, 8, 9], 4, 4) == (Run(4, 4),)
    assert runs([1], 0, 4) == ()


@given(st.permutations(range(9)), st.integers(0, 27))
def test_runs_visit_every_slot_in_order_and_are_as_few_as_possible(table, num_tokens):
    found = runs(table, num_tokens, 3)
    slots = [slot for run in found for slot in range(run.start, run.start + run.length)]
    assert slots == [table[p // 3] * 3 + p % 3 for p in range(num_tokens)]
    assert all(a.start + a.length != b.start for a, b in pairwise(found))


def test_what_is_written_is_read_back():
    pool = KVPool(CONFIG, 6, 4, torch.float32, torch.device("cpu"))
    layer = pool.layers[1]
    keys, values = torch.randn(6, 2, 4), torch.randn(6, 2, 4)
    slots = torch.tensor([16, 17, 18, 19, 8, 9])
    layer.write(slots, keys, values)
    found_keys, found_values = layer.read(Run(16, 4))
    assert found_keys.shape == (1, 2, 4, 4)
    assert torch.equal(found_keys[0].transpose(0, 1), keys[:4])
    assert torch.equal(found_values[0].transpose(0, 1), values[:4])
    assert found_keys.untyped_storage().data_ptr() == layer.keys.untyped_storage().data_ptr()
    gathered, _ = layer.read(Scattered(torch.tensor([4, 2]), 4, 6))
    assert torch.equal(gathered[0].transpose(0, 1), keys)


def test_only_many_short_runs_are_copied_together():
    cpu = torch.device("cpu")
    assert stretches([9, 0], 8, 4, cpu) == runs([9, 0], 8, 4)
    long = [*range(50, 67), *range(17), *range(20, 37)]
    assert stretches(long, 204, 4, cpu) == runs(long, 204, 4)
    [scattered] = stretches([9, 0, 5, 7], 11, 4, cpu)
    assert scattered.blocks.tolist() == [9, 0, 5]
    assert scattered.length == 11


def test_bytes_of_a_block():
    pool = KVPool(CONFIG, 1, 4, torch.bfloat16, torch.device("cpu"))
    held = sum(t.numel() * t.itemsize for layer in pool.layers for t in layer)
    assert bytes_per_block(CONFIG, 4, torch.bfloat16) == held
