"""All layers in one call: the bits of layer by layer, and when it is not taken."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from qwen3_asgi.model.batch import build_batch
from qwen3_asgi.model.cpu.kernels import CpuKernels
from qwen3_asgi.model.cpu.layers import cpu_layers
from qwen3_asgi.model.kv import KVPool
from qwen3_asgi.model.linear import Linear
from qwen3_asgi.model.operators import TorchOperators
from qwen3_asgi.scheduler.plan import RequestId, Row
from tests.model.checkpoints import VOCAB, load, write_checkpoint

BLOCK, EACH = 4, 10


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"), "tied")


def opened(folder, **settings):
    executor = load(folder, block_size=BLOCK, num_kv_blocks=4 * EACH, **settings)
    model, pool = executor._loaded
    if not isinstance(model.operators, CpuKernels):
        pytest.skip("no kernels on this machine")
    return executor, model, pool


@torch.inference_mode()
def empty(pool):
    """So that what nobody has written spoils whoever reads it."""
    for layer in pool.layers:
        for cache in layer:
            cache.fill_(float("nan"))


def rows_at(start):
    """Decode rows, chunks, and both, with sequences before them or not."""
    lengths = (1, 9, 1, 30 - start)
    return [
        Row(
            RequestId(str(i)),
            "prefill",
            [(7 * i + 3 * k) % VOCAB for k in range(length)],
            start,
            list(range(i * EACH, (i + 1) * EACH)),
            None,
        )
        for i, length in enumerate(lengths)
    ]


SETTINGS = [
    {"dtype": "float32"},
    {"dtype": "bfloat16"},
    {"dtype": "bfloat16", "batch_invariant": True},
    {"dtype": "float32", "quantization": "int8"},
    {"dtype": "bfloat16", "quantization": "int8"},
]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_one_call_gives_the_bits_of_layer_by_layer(folder, settings, threads):
    executor, model, pool = opened(folder, **settings)
    if model.whole is None:
        assert settings.get("quantization"), "only 8 bits ask for more of a CPU than the kernels"
        pytest.skip("this CPU has no AVX-512 VNNI")
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = {}
        for way in (model.whole, None):
            model.whole = way
            empty(pool)
            logits = [executor.forward_logits(rows_at(0))]
            logits += [executor.forward_logits([row]) for row in rows_at(0)]
            logits.append(executor.forward_logits([rows_at(1)[0], rows_at(9)[1]]))
            kept = [
                cache[:, : 2 * EACH * BLOCK].nan_to_num(7.0)
                for each in pool.layers
                for cache in each
            ]
            found[way is None] = [*logits, *kept]
    finally:
        torch.set_num_threads(before)
    assert all(each.isfinite().all() for each in found[False])
    assert all(torch.equal(*pair) for pair in zip(found[False], found[True], strict=True))


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize(
    "wanted", [[], [0], [40], [0, 9, 10, 40], [3, 4, 5, 6, 7, 8], [*range(41)]]
)
def test_rows_that_nobody_wants_change_nothing(folder, settings, wanted):
    executor, model, pool = opened(folder, **settings)
    ways = {}
    with torch.inference_mode():
        for each in (None, wanted):
            empty(pool)
            batch = build_batch(
                rows_at(0),
                vocab_size=VOCAB,
                block_size=BLOCK,
                num_blocks=pool.num_blocks,
                max_tokens=64,
                device=executor.device,
                paged=True,
            )
            hidden = model.forward(batch, pool, (), each)
            kept = [cache.nan_to_num(7.0) for layer in pool.layers for cache in layer]
            ways[each is None] = hidden, kept
    assert torch.equal(ways[False][0], ways[True][0][wanted])
    assert all(map(torch.equal, ways[False][1], ways[True][1]))


@pytest.mark.parametrize("wanted", [[-1], [1, 41], [2, 1], [1, 1]])
def test_rows_out_of_order_or_range_never_reach_the_library(folder, wanted):
    _, model, pool = opened(folder, dtype="float32")
    x = torch.zeros(41, 48)
    with pytest.raises(ValueError, match="not in order"):
        model.whole(x, None, pool, None, None, wanted)


def test_another_pool_is_written_to_in_its_turn(folder):
    executor, model, pool = opened(folder, dtype="float32")
    other = KVPool(executor.model_config, pool.num_blocks, BLOCK, executor.dtype, executor.device)
    first = executor.forward_logits(rows_at(0))
    executor._loaded = (model, other)
    empty(pool)
    assert torch.equal(executor.forward_logits(rows_at(0)), first)
    assert all(cache.isnan().all() for layer in pool.layers for cache in layer)


def test_the_time_of_its_parts_is_told_only_when_asked_for(folder):
    executor, model, _ = opened(folder, dtype="float32")
    told = []
    model.whole.on_seconds = told.append
    executor.forward_logits(rows_at(0))
    model.whole.on_seconds = None
    executor.forward_logits(rows_at(0))
    [seconds] = told
    assert min(seconds) > 0


def test_a_matrix_of_another_kind_means_layer_by_layer(folder):
    _, model, _ = opened(folder, dtype="bfloat16")
    weights = model._weights
    assert cpu_layers(model.operators, weights) is not None
    layer = weights.layers[1]
    object.__setattr__(layer, "down", Linear(torch.zeros(layer.down.shape).bfloat16()))
    assert cpu_layers(model.operators, weights) is None


def test_other_operators_run_layer_by_layer(folder):
    executor, model, pool = opened(folder, dtype="float32")
    operators, first = model.operators, executor.forward_logits(rows_at(0))
    model.operators = TorchOperators(4, 2, 16, executor.model_config.rms_norm_eps)
    assert model.whole is None
    model.operators = operators
    assert model.whole is not None
    empty(pool)
    assert torch.equal(executor.forward_logits(rows_at(0)), first)


SCARCE = """
import re, resource
from dataclasses import replace
from pathlib import Path
from qwen3_asgi.config import EngineConfig
from qwen3_asgi.model.executor import load_executor
from qwen3_asgi.model.shapes import named_shape
from qwen3_asgi.scheduler.plan import RequestId, Row

shape = replace(named_shape("Qwen3-0.6B"), num_layers=1, vocab_size=256, hidden_size=64,
                intermediate_size=16384)
settings = {"quantization": "int8"} if EIGHT_BITS else {}
executor = load_executor(
    shape,
    EngineConfig(load_format="dummy", device="cpu", dtype="float32", num_threads=1,
                 num_kv_blocks=40, block_size=16, **settings),
    owned_token_ids=256,
)

def run(count):
    return executor.forward_logits(
        [Row(RequestId("r"), "prefill", [7] * count, 0, list(range(-(-count // 16))), None)]
    )

few = run(2)
size = int(re.search(r"VmSize:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024
resource.setrlimit(resource.RLIMIT_AS, (size + 2**24, resource.RLIM_INFINITY))
try:
    run(512)
except (MemoryError, RuntimeError) as error:
    print(type(error).__name__, error)
assert (run(2) == few).all()
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
assert len(run(512)) == 512
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits and sizes are Linux's")
@pytest.mark.parametrize("eight_bits", [False, True])
def test_memory_that_is_not_there_is_an_error_of_that_step(folder, eight_bits):
    _, model, _ = opened(
        folder, dtype="float32", **({"quantization": "int8"} if eight_bits else {})
    )
    if model.whole is None:
        pytest.skip("this CPU has no AVX-512 VNNI")
    script = f"EIGHT_BITS = {eight_bits}\n{SCARCE}"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "MemoryError no memory for the intermediate results of a step\n"
