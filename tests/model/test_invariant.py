"""Batch-invariant mode, to the last bit: whatever else a step holds, and however it was cut."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qwen3_asgi.errors import ModelLoadError
from qwen3_asgi.model import invariant
from qwen3_asgi.model.cpu.library import kernel_library
from qwen3_asgi.model.cpu.linear import PanelLinear
from qwen3_asgi.model.cuda import choosing
from qwen3_asgi.model.fingerprint import fingerprint
from qwen3_asgi.model.invariant import invariant_operators, order_of
from qwen3_asgi.model.invariant_operators import TiledOperators
from qwen3_asgi.model.invariant_tiles import Tiles
from qwen3_asgi.model.shapes import named_shape
from tests.model.checkpoints import write_checkpoint
from tests.model.driver import poison
from tests.model.invariant_world import (
    BLOCKS,
    DTYPES,
    LENGTHS,
    PATHS,
    World,
    different,
    load_on,
    path_of,
)

LONGEST = LENGTHS.index(max(LENGTHS))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("tied"), "tied")


@pytest.fixture(scope="module", params=DTYPES)
def dtype(request):
    return request.param


@pytest.fixture(scope="module", params=PATHS)
def world(request, folder, dtype):
    executor = load_on(request.param, folder, dtype=dtype, batch_invariant=True)
    poison(executor, range(BLOCKS))
    return World(executor)


def together(number, *, at):
    """`number` whole sequences in one step, the longest of them at index `at`."""
    others = [i for i in range(len(LENGTHS)) if i != LONGEST]
    which = [others[i % len(others)] for i in range(number)]
    which[at] = LONGEST
    return [(i, 0, LENGTHS[i], place) for place, i in enumerate(which)]


@pytest.mark.parametrize("number", [2, 8, 33])
def test_company_changes_no_bit(world, number):
    for at in (0, number // 2, number - 1):
        assert world.run(together(number, at=at)) == 0


@pytest.mark.parametrize("size", [1, 7, 16, 64])
def test_chunks_of_a_prompt_change_no_bit(world, size):
    for start in range(0, max(LENGTHS), size):
        assert world.run([(LONGEST, start, min(start + size, max(LENGTHS)), 0)]) == 0


def test_others_that_decode_or_prefill_in_the_same_step_change_no_bit(world):
    for start in range(100):
        rows = [(LONGEST, start, start + 1, 0)]
        if start % 3 == 0:
            rows = [(4, 0, 10 + start % 64, 1), *rows, (2, 0, 64, 2)]
        assert world.run(rows) == 0


def test_a_prefix_that_others_have_computed_changes_no_bit(world):
    world.run([(1, 0, 3, 3), (LONGEST, 0, 96, 0), (4, 0, 90, 2)])
    assert world.run([(4, 0, 90, 1), (LONGEST, 96, 150, 0)]) == 0


def test_what_is_computed_again_after_a_preemption_changes_no_bit(world):
    for start in range(40):
        world.run([(LONGEST, start, start + 1, 4)])
    # Elsewhere now, and what was decoded is part of the prompt.
    assert world.run([(LONGEST, 0, 40, 7), (3, 0, 17, 1)]) == 0
    for start in range(40, 60):
        assert world.run([(LONGEST, start, start + 1, 7)]) == 0


@given(data=st.data())
@settings(max_examples=25)
def test_random_steps_change_no_bit(world, data):
    """Up to 12 runs of sequences, each cut at random, in steps of random company."""
    runs = data.draw(st.lists(st.integers(0, len(LENGTHS) - 1), min_size=1, max_size=12))
    done = [0] * len(runs)
    for _ in range(data.draw(st.integers(1, 8))):
        rows = []
        for place, which in enumerate(runs):
            left = LENGTHS[which] - done[place]
            length = data.draw(
                st.one_of(st.integers(0, 1), st.integers(0, 70)).map(
                    lambda n, most=left: min(n, most)
                )
            )
            if length:
                rows.append((which, done[place], done[place] + length, place))
                done[place] += length
        rows = data.draw(st.permutations(rows))
        if rows:
            assert world.run(rows) == 0


@pytest.mark.parametrize("path", PATHS)
def test_what_is_fixed_here_is_not_so_by_itself(path, folder):
    """So the tests above can fail."""
    loose = World(load_on(path, folder, dtype="float32"))
    deviations = [
        loose.run(rows)
        for rows in (together(8, at=3), [(LONGEST, 0, 7, 0)], [(LONGEST, 7, 8, 0)], [(1, 0, 3, 1)])
    ]
    if not any(deviations):
        pytest.skip("on this machine nothing deviates in any mode")
    tight = World(load_on(path, folder, dtype="float32", batch_invariant=True))
    # The same numbers but for rounding, so it is the same model.
    torch.testing.assert_close(tight.whole[0], loose.whole[0], rtol=1e-4, atol=1e-4)


def test_a_deviation_of_one_bit_is_seen(world):
    bent = world.whole[LONGEST].clone()
    bent[7, 11] = torch.nextafter(bent[7, 11], torch.tensor(torch.inf))
    assert different(bent, world.whole[LONGEST]) == 1


def test_threads_change_no_bit(folder, dtype):
    """With the compiled kernels; without them the libraries share sums as they like."""
    one = World(load_on("compiled", folder, dtype=dtype, batch_invariant=True))
    if isinstance(one.executor._open()[0].operators, TiledOperators):
        pytest.skip("no kernels on this machine")
    before = torch.get_num_threads()
    try:
        two = World(load_on("compiled", folder, dtype=dtype, batch_invariant=True, num_threads=2))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert sum(map(different, two.whole, one.whole)) == 0


@pytest.mark.parametrize("path", PATHS)
def test_weights_in_8_bits_change_no_bit_either(path, folder, dtype):
    settings_ = {"dtype": dtype, "quantization": "int8", "batch_invariant": True}
    if path == "plain" or not kernel_library()[0] or not kernel_library()[0].qwen3_has_int8():
        with pytest.raises(ModelLoadError, match="quantization='int8' needs the compiled kernels"):
            load_on(path, folder, **settings_)
        return
    small = World(load_on(path, folder, **settings_))
    assert small.run(together(8, at=3)) == 0
    for size in (1, 40):
        for start in range(0, 120, size):
            assert small.run([(4, 0, 5, 2), (LONGEST, start, start + size, 0)]) == 0


@pytest.mark.parametrize("path", PATHS)
def test_the_numbers_are_those_of_the_usual_mode_but_for_rounding(path, folder, dtype):
    settings_ = {"dtype": dtype, "num_threads": 1}
    usual = World(load_on(path, folder, **settings_)).whole[LONGEST]
    found = World(load_on(path, folder, **settings_, batch_invariant=True)).whole[LONGEST]
    if dtype == "float32":
        torch.testing.assert_close(found, usual, rtol=1e-4, atol=1e-4)
    similarity = torch.nn.functional.cosine_similarity(found, usual, dim=1)
    assert float(similarity.min()) > 0.99


def test_kept_blocks_are_told_apart_by_the_order_they_were_computed_in(folder):
    config, cpu = named_shape("Qwen3-0.6B"), torch.device("cpu")
    orders = []
    for path in PATHS:
        with path_of(path):
            orders += [
                order_of(invariant_operators(config, dtype, cpu), dtype, cpu)
                for dtype in (torch.float32, torch.bfloat16)
            ]
    files = ["model.safetensors"]
    assert fingerprint(folder, files) == fingerprint(folder, files, None)
    seen = {fingerprint(folder, files), *(fingerprint(folder, files, order) for order in orders)}
    assert len(seen) == 1 + len(set(orders))
    assert len(set(orders)) >= 2


@pytest.mark.parametrize(
    ("head_dim", "triton", "words"),
    [(96, True, "head_dim 96"), (128, False, "triton is not installed")],
)
def test_on_cuda_it_needs_the_kernels(monkeypatch, head_dim, triton, words):
    config = dataclasses.replace(named_shape("Qwen3-0.6B"), head_dim=head_dim)
    monkeypatch.setattr(choosing, "find_spec", lambda name: object() if triton else None)
    with pytest.raises(ModelLoadError, match=f"batch_invariant=True on cuda:1 needs .*{words}"):
        invariant_operators(config, torch.bfloat16, torch.device("cuda:1"))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_kernels_that_are_wrong_are_not_used(monkeypatch, device, caplog):
    config = named_shape("Qwen3-0.6B")
    monkeypatch.setattr(invariant, "find_fault", lambda *arguments: "silu_mul")
    monkeypatch.setattr(invariant, "unsupported", lambda *arguments: None)
    if device == "cuda":
        with pytest.raises(ModelLoadError, match="which were wrong on trial"):
            invariant_operators(config, torch.bfloat16, torch.device(device))
        return
    found = invariant_operators(config, torch.bfloat16, torch.device(device))
    assert isinstance(found, TiledOperators)
    assert ("wrong on trial: silu_mul" in caplog.text) == (kernel_library()[0] is not None)


@pytest.mark.parametrize("path", PATHS)
def test_weights_are_multiplied_by_invariant_products_only(folder, path):
    model, _ = load_on(path, folder, batch_invariant=True)._open()
    weights = model._weights
    kind = Tiles if path == "plain" or kernel_library()[0] is None else PanelLinear
    for layer in weights.layers:
        for linear in (layer.qkv, layer.output, layer.gate_up, layer.down):
            assert isinstance(linear, kind)
    assert isinstance(weights.lm_head, kind)
