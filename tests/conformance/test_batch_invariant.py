"""Batch-invariant engines: the same tokens and logprobs, as floats, alone and in a storm."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

import pytest
import torch
from prometheus_client import CollectorRegistry

from qwen3_asgi import Engine, EngineConfig, SamplingParams, cli
from qwen3_asgi.model.cpu.library import kernel_library
from qwen3_asgi.model.memory import GIB
from qwen3_asgi.testing import assert_idle

MODES = ({}, {"overlap": True}, {"overlap": True, "pipelined": True})
ASKED = [
    (
        "What is the capital of France? Answer with the name of the city and a sentence about it.",
        SamplingParams(max_tokens=40, temperature=0, logprobs=4, ignore_eos=True),
    ),
    (
        "Count from 1 to 20.",
        SamplingParams(max_tokens=48, temperature=0.9, seed=3, logprobs=2, ignore_eos=True),
    ),
    (
        "word " * 40,
        SamplingParams(
            max_tokens=30, temperature=1.0, top_k=20, top_p=0.9, seed=8, logprobs=0, ignore_eos=True
        ),
    ),
    (
        "Name three animals. Name three elements. Name three colours.",
        SamplingParams(max_tokens=24, temperature=1.1, seed=5, logprobs=1, n=3, ignore_eos=True),
    ),
]
ROUNDS = 3
# A request fits, all together do not.
BLOCK, POOL_BLOCKS = 4, 40
HOST_GIB = 40 * 2**20 / GIB


def answers(output):
    """All that was said, with its logprobs."""
    return [(each.token_ids, each.logprobs) for each in output.outputs]


def counted(registry, name):
    """A counter's value over all its labels."""
    return sum(
        sample.value
        for family in registry.collect()
        for sample in family.samples
        if sample.name == name
    )


def alone(dtype, **settings):
    """Each request by itself, whole, with nothing in the cache."""
    config = EngineConfig(device="cpu", dtype=dtype, prefix_cache=False, **settings)
    with Engine("tiny", config) as engine:
        return [
            answers(engine.generate_sync(prompt=prompt, params=params)) for prompt, params in ASKED
        ]


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def dtype(request):
    return request.param


@pytest.fixture(scope="module")
def expected(dtype):
    return alone(dtype, batch_invariant=True)


def disturb(engine, over):
    """Neighbours that come, decode for a while, and are cancelled at any stage, until `over`."""
    number = 0
    while not over.is_set():
        handles = []
        for _ in range(5):
            number += 1
            prompt = f"{number} neighbours " * (1 + number % 5)
            params = SamplingParams(
                max_tokens=90, temperature=0.7 * (number % 2), seed=number, ignore_eos=True
            )
            handles.append(engine.submit_sync(prompt=prompt, params=params))
        for handle in handles:
            for _ in islice(handle.read_sync(), number % 6):
                pass
            handle.cancel()


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: "+".join(mode) or "in turn")
def test_a_storm_changes_no_float(dtype, expected, mode):
    """In a pool that is too small: chunks, prefix hits, preemptions and copies from the host."""
    registry = CollectorRegistry()
    config = EngineConfig(
        device="cpu",
        dtype=dtype,
        batch_invariant=True,
        block_size=BLOCK,
        num_kv_blocks=POOL_BLOCKS,
        max_prefill_tokens=23,
        max_batch=9,
        max_context_tokens=BLOCK * POOL_BLOCKS,
        host_kv_gib=HOST_GIB,
        **mode,
    )
    with Engine("tiny", config) as engine:
        engine.metrics(registry=registry)
        over = threading.Event()
        with ThreadPoolExecutor(len(ASKED) + 1) as pool:
            neighbours = pool.submit(disturb, engine, over)
            try:
                for _ in range(ROUNDS):
                    futures = [
                        pool.submit(engine.generate_sync, prompt=prompt, params=params)
                        for prompt, params in ASKED
                    ]
                    assert [answers(future.result(120)) for future in futures] == expected
            finally:
                over.set()
            neighbours.result(120)
        assert_idle(engine)
        assert counted(registry, "vllm:num_preemptions_total") > 0
        found = ("vllm:prefix_cache_hits_total", "vllm:external_prefix_cache_hits_total")
        assert sum(counted(registry, name) for name in found) > 0


@pytest.mark.parametrize("where", ["device", "host"])
def test_a_prefix_from_the_cache_changes_no_float(dtype, expected, where):
    registry = CollectorRegistry()
    config = EngineConfig(
        device="cpu",
        dtype=dtype,
        batch_invariant=True,
        block_size=BLOCK,
        num_kv_blocks=POOL_BLOCKS,
        max_context_tokens=BLOCK * POOL_BLOCKS,
        host_kv_gib=HOST_GIB if where == "host" else 0.0,
    )
    with Engine("tiny", config) as engine:
        engine.metrics(registry=registry)
        for (prompt, params), wanted in zip(ASKED, expected, strict=True):
            for turn in range(2):
                assert answers(engine.generate_sync(prompt=prompt, params=params)) == wanted
                if where == "host":  # as long as the pool: nothing else stays there
                    engine.generate_sync(
                        prompt_token_ids=[5 + turn] * (BLOCK * POOL_BLOCKS - 2),
                        params=SamplingParams(max_tokens=1, ignore_eos=True),
                    )
        name = "vllm:prefix_cache_hits_total"
        if where == "host":
            name = "vllm:external_prefix_cache_hits_total"
        assert counted(registry, name) > 0


def test_a_file_of_blocks_is_for_those_that_compute_the_same_bits(expected, dtype, tmp_path):
    def visit(**settings):
        """What is said, and how many prompt tokens came out of the file."""
        registry = CollectorRegistry()
        config = EngineConfig(
            device="cpu",
            dtype=dtype,
            block_size=BLOCK,
            num_kv_blocks=POOL_BLOCKS,
            max_context_tokens=BLOCK * POOL_BLOCKS,
            kv_file=str(tmp_path / "kv"),
            kv_file_gib=HOST_GIB,
            **settings,
        )
        with Engine("tiny", config) as engine:
            engine.metrics(registry=registry)
            said = [
                answers(engine.generate_sync(prompt=prompt, params=params))
                for prompt, params in ASKED
            ]
            engine.generate_sync(
                prompt_token_ids=[5] * (BLOCK * POOL_BLOCKS - 2),
                params=SamplingParams(max_tokens=1, ignore_eos=True),
            )
        return said, counted(registry, "vllm:external_prefix_cache_hits_total")

    visit()
    assert visit()[1] > 0
    assert visit(batch_invariant=True) == (expected, 0)
    said, found = visit(batch_invariant=True)
    assert found > 0
    assert said == expected


@pytest.mark.parametrize("size", [1, 7, 64])
def test_the_size_of_chunks_changes_no_float(dtype, expected, size):
    found = alone(dtype, batch_invariant=True, max_prefill_tokens=size, block_size=5)
    assert found == expected


def test_threads_change_no_float(dtype, expected):
    if kernel_library()[0] is None:
        pytest.skip("without the compiled kernels libraries share sums among threads as they like")
    before = torch.get_num_threads()
    try:
        assert alone(dtype, batch_invariant=True, num_threads=2) == expected
        # What a new thread takes is what the engine's thread has set.
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(torch.get_num_threads).result() == 2
    finally:
        torch.set_num_threads(before)


def test_it_is_an_option_of_the_command_line():
    parse = cli._parser().parse_args
    for words, wanted in ([], False), (["--batch-invariant"], True):
        engine = cli._engine(parse(["serve", "tiny", *words]))
        assert engine.config.batch_invariant is wanted


def test_without_the_mode_some_float_changes():
    """What is fixed here can go wrong: the tests above can fail."""
    usual, cut = (alone("float32", max_prefill_tokens=size) for size in (512, 1))
    if usual == cut:
        pytest.skip("on this machine nothing deviates in any mode")
    assert [[len(tokens) for tokens, _ in each] for each in usual] == [
        [params.max_tokens] * params.n for _, params in ASKED
    ]
