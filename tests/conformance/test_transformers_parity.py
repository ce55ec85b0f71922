"""transformers' Qwen3ForCausalLM is the truth: logits and greedy continuations in float32."""

from __future__ import annotations

import random
from typing import NamedTuple

import pytest
import torch

from qwen3_asgi.model import kv
from qwen3_asgi.model.operators import TorchOperators
from qwen3_asgi.scheduler.plan import RequestId, Row
from tests.model.checkpoints import (
    KINDS,
    SPELLINGS,
    VOCAB,
    greedy,
    load,
    load_reference,
    reference_logits,
    write_checkpoint,
)
from tests.model.driver import Driver, Sequence_, poison

PROMPT_TOKENS = 21
NEW_TOKENS = 24
BLOCKS = list(range(12))  # of 4 tokens: 48 hold prompt and output
SCATTERED = [40, 3, 17, 50, 9, 33, 22, 60, 1, 28, 55, 13]


class Truth(NamedTuple):
    model: torch.nn.Module
    prompt: list[int]
    logits: torch.Tensor
    continuation: list[int]


@pytest.fixture(scope="module", params=KINDS)
def folder(request, tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def truth(folder):
    model = load_reference(folder)
    prompt = random.Random(5).choices(range(VOCAB), k=PROMPT_TOKENS)
    return Truth(model, prompt, reference_logits(model, prompt), greedy(model, prompt, NEW_TOKENS))


@pytest.fixture(scope="module", params=["kernels", "plain"])
def executor(folder, request):
    executor = load(folder)
    model, _ = executor._loaded
    if request.param == "plain":
        model.operators = TorchOperators(4, 2, 16, 1e-6)
    elif not model.operators.reads_tables:
        pytest.skip("no CPU kernels on this machine")
    return executor


@pytest.fixture
def driver(executor):
    poison(executor, range(executor.num_kv_blocks))
    return Driver(executor)


def row(name, tokens, blocks, start=0):
    return Row(RequestId(name), "prefill", tokens, start, blocks, None)


def assert_logits_equal(found, expected):
    largest = float(expected.abs().max())
    assert float((found - expected).abs().max()) <= 1e-4 * largest
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * largest)


def strangers():
    """Three other requests: two of them decode, one still prefills in chunks."""
    rng = random.Random(11)
    return [
        Sequence_(f"stranger{i}", rng.choices(range(VOCAB), k=length), range(first, first + 12))
        for i, (length, first) in enumerate([(5, 12), (14, 24), (30, 36)])
    ]


def test_the_truth_is_not_trivial(truth):
    assert len(set(truth.continuation)) > NEW_TOKENS // 2
    assert float(truth.logits.std()) > 0.5


def test_every_prompt_logit_matches(driver, truth):
    found = driver.executor.forward_logits([row("a", truth.prompt, BLOCKS)])
    assert_logits_equal(found, truth.logits)


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("kind", KINDS)
def test_both_spellings_of_the_config_give_the_same_model(kind, spelling, tmp_path):
    folder = write_checkpoint(tmp_path, kind, spelling)
    tokens = random.Random(3).choices(range(VOCAB), k=40)
    expected = reference_logits(load_reference(folder), tokens)
    assert_logits_equal(load(folder).forward_logits([row("a", tokens, BLOCKS)]), expected)


def test_yarn_matches_beyond_the_original_context(tmp_path):
    folder = write_checkpoint(tmp_path, "yarn")
    tokens = random.Random(4).choices(range(VOCAB), k=120)
    expected = reference_logits(load_reference(folder), tokens)
    found = load(folder).forward_logits([row("a", tokens, range(30))])
    assert_logits_equal(found, expected)


def test_whole_greedy_continuation_is_identical(driver, truth):
    sequence = Sequence_("a", truth.prompt, BLOCKS)
    driver.run(sequence, NEW_TOKENS)
    assert sequence.output == truth.continuation


@pytest.mark.parametrize("boundary", range(1, PROMPT_TOKENS))
def test_prompt_chunked_at_every_boundary(driver, truth, boundary):
    first = driver.executor.forward_logits([row("a", truth.prompt[:boundary], SCATTERED)])
    second = driver.executor.forward_logits(
        [row("a", truth.prompt[boundary:], SCATTERED, start=boundary)]
    )
    assert_logits_equal(torch.cat((first, second)), truth.logits)
    sequence = Sequence_("a", truth.prompt, BLOCKS)
    driver.step((sequence, boundary))
    driver.run(sequence, NEW_TOKENS)
    assert sequence.output == truth.continuation


@pytest.mark.parametrize("size", [1, 3, 4, 7])
def test_prompt_in_many_chunks(driver, truth, size):
    sequence = Sequence_("a", truth.prompt, SCATTERED)
    while sequence.computed + size < PROMPT_TOKENS:
        driver.step((sequence, size))
    driver.run(sequence, NEW_TOKENS)
    assert sequence.output == truth.continuation


@pytest.mark.parametrize(
    "blocks",
    [BLOCKS[::-1], SCATTERED, [0, 1, 2, 9, 10, 11, 3, 4, 5, 20, 21, 22]],
    ids=["reversed", "scattered", "pieces"],
)
@pytest.mark.parametrize("worthwhile", [0, kv.WORTHWHILE_RUN_TOKENS], ids=["merged", "copied"])
def test_blocks_may_lie_anywhere(driver, truth, blocks, worthwhile, monkeypatch):
    monkeypatch.setattr(kv, "WORTHWHILE_RUN_TOKENS", worthwhile)
    found = driver.executor.forward_logits([row("a", truth.prompt, blocks)])
    assert_logits_equal(found, truth.logits)
    sequence = Sequence_("a", truth.prompt, blocks)
    driver.run(sequence, NEW_TOKENS)
    assert sequence.output == truth.continuation


@pytest.mark.parametrize("worthwhile", [0, kv.WORTHWHILE_RUN_TOKENS], ids=["merged", "copied"])
def test_every_second_block_in_a_long_prompt(driver, truth, worthwhile, monkeypatch):
    monkeypatch.setattr(kv, "WORTHWHILE_RUN_TOKENS", worthwhile)
    tokens = random.Random(6).choices(range(VOCAB), k=110)
    expected = reference_logits(truth.model, tokens)
    blocks = list(range(0, 60, 2))
    first = driver.executor.forward_logits([row("a", tokens[:90], blocks)])
    rest = driver.executor.forward_logits([row("a", tokens[90:109], blocks, start=90)])
    last = driver.executor.forward_logits([row("a", tokens[109:], blocks, start=109)])
    assert_logits_equal(torch.cat((first, rest, last)), expected)


def test_strangers_in_the_batch_change_nothing(driver, truth):
    sequence = Sequence_("a", truth.prompt, BLOCKS)
    short, middle, long = others = strangers()
    driver.step(short, (middle, 6))
    driver.step(short, (middle, 4), (long, 9), (sequence, 8))
    driver.step(short, middle, (long, 9), (sequence, 5))
    driver.step(short, middle, (long, 8), sequence)
    driver.step(short, middle, sequence, (long, 2))
    driver.run(sequence, NEW_TOKENS, beside=[short, middle])
    driver.step(long)
    assert sequence.output == truth.continuation
    for other in others:
        prompt = other.tokens[: other.prompt_len]
        assert other.output == greedy(truth.model, prompt, len(other.output))


def test_prefix_of_another_request_is_served_from_its_blocks(driver, truth):
    shared = truth.prompt[:12]
    owner = Sequence_("owner", [*shared, 5, 6, 7], [50, 2, 31, 8])
    driver.step(owner)
    sequence = Sequence_("a", truth.prompt, [50, 2, 31, *range(40, 49)], computed=12)
    driver.run(sequence, NEW_TOKENS, beside=[])
    assert sequence.output == truth.continuation


@pytest.mark.parametrize("after", [1, 6, 15])
def test_preempted_and_resumed_in_other_blocks(driver, truth, after):
    sequence = Sequence_("a", truth.prompt, BLOCKS)
    driver.run(sequence, after)
    poison(driver.executor, BLOCKS)
    sequence.blocks, sequence.computed = list(SCATTERED), 0
    driver.step((sequence, 10), Sequence_("other", [1, 2, 3], [62]))
    driver.run(sequence, NEW_TOKENS)
    assert sequence.output == truth.continuation
