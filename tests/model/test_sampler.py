from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from qwen3_asgi.model import truncation
from qwen3_asgi.model.sampler import RowError, Sampler
from qwen3_asgi.model.uniform import splitmix64, uniform
from qwen3_asgi.scheduler.plan import SampledToken, SampleSpec, Sampling

VOCAB = 24
CPU = torch.device("cpu")


def reference(logits, sampling, u):
    """The token by plain Python: temperature, min_p, top_k, top_p, inverse CDF."""
    best = max(logits)
    weights = {
        i: math.exp((logit - best) / sampling.temperature)
        for i, logit in enumerate(logits)
        if logit > -math.inf
    }
    weights = {i: w for i, w in weights.items() if w >= sampling.min_p}
    ranked = sorted(weights, key=lambda i: (-logits[i], i))
    filtered = sampling.top_p < 1 or 0 < sampling.top_k < len(logits)
    if 0 < sampling.top_k < len(logits):
        ranked = ranked[: sampling.top_k]
    total = sum(weights[i] for i in ranked)
    kept, before = [], 0.0
    for i in ranked:
        if before < sampling.top_p * total:
            kept.append(i)
        before += weights[i]
    kept = kept if filtered else sorted(kept)
    target, running = u * sum(weights[i] for i in kept), 0.0
    for i in kept:
        running += weights[i]
        if running > target:
            return i
    return kept[-1]


def sampler(owned=VOCAB, vocab=VOCAB):
    return Sampler(vocab, owned, CPU)


def tokens(logits, specs, **kw):
    rows = torch.tensor(logits, dtype=torch.float32)
    return [result.token_id for result in sampler(vocab=rows.shape[1], **kw).sample(rows, specs)]


# Quarters: exact in float32, with plenty of ties.
LOGITS = st.lists(st.integers(-20, 20).map(lambda n: n / 4), min_size=VOCAB, max_size=VOCAB)
SAMPLINGS = st.builds(
    Sampling,
    temperature=st.sampled_from([0.3, 0.7, 1.0, 1.6]),
    top_k=st.sampled_from([-1, 0, 1, 2, 5, 23, 24, 100]),
    top_p=st.sampled_from([1e-9, 0.3, 0.61, 0.95, 1.0]),
    min_p=st.sampled_from([0.0, 0.013, 0.2, 1.0]),
    seed=st.integers(-(2**63), 2**63 - 1),
)


@settings(max_examples=300, deadline=None)
@given(LOGITS, SAMPLINGS, st.integers(0, 50))
@example([0.0] * VOCAB, Sampling(top_k=5, seed=3), 0)
@example([0.0] * VOCAB, Sampling(top_p=0.61, seed=3), 1)
def test_every_combination_of_filters_equals_plain_python(logits, sampling, position):
    u = uniform(sampling.seed, position)
    assert tokens([logits], [SampleSpec(sampling, position)]) == [reference(logits, sampling, u)]


@settings(max_examples=100, deadline=None)
@given(LOGITS, SAMPLINGS, st.integers(0, 50))
def test_a_nucleus_that_needs_the_whole_sort_gives_the_same(logits, sampling, position):
    spec = SampleSpec(sampling, position)
    expected = tokens([logits], [spec])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(truncation, "NUCLEUS_GUESS", 3)
        assert tokens([logits], [spec]) == expected


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(LOGITS, SAMPLINGS, st.booleans()), min_size=2, max_size=5))
def test_a_row_does_not_depend_on_its_batch(rows):
    specs = [
        SampleSpec(Sampling(temperature=0.0) if greedy else sampling, 3)
        for _, sampling, greedy in rows
    ]
    together = tokens([logits for logits, _, _ in rows], specs)
    alone = [tokens([row[0]], [spec])[0] for row, spec in zip(rows, specs, strict=True)]
    assert together == alone


def test_greedy_takes_the_first_of_equal_maxima():
    logits = [0.0] * VOCAB
    logits[9] = logits[4] = 2.0
    assert tokens([logits], [SampleSpec(Sampling(temperature=0.0), 0)]) == [4]


def test_the_seed_decides_and_positions_differ():
    logits = [[0.0] * VOCAB]
    drawn = [tokens(logits, [SampleSpec(Sampling(seed=5), p)])[0] for p in range(40)]
    again = [tokens(logits, [SampleSpec(Sampling(seed=5), p)])[0] for p in range(40)]
    other = [tokens(logits, [SampleSpec(Sampling(seed=6), p)])[0] for p in range(40)]
    assert drawn == again
    assert drawn != other
    assert len(set(drawn)) > 10


def test_a_tiny_temperature_is_greedy_not_an_overflow():
    logits = [[3.0, 9.0, 8.9, -1.0]]
    assert tokens(logits, [SampleSpec(Sampling(temperature=1e-300), 0)], owned=4) == [1]


def test_many_seeds_follow_the_distribution():
    logits = [1.0, 0.0, 2.0, -1.0]
    expected = torch.tensor(logits).softmax(0).tolist()
    count = 4000
    specs = [SampleSpec(Sampling(seed=seed), 2) for seed in range(count)]
    found = Counter(tokens([logits] * count, specs, owned=4))
    chi_squared = sum((found[i] - count * p) ** 2 / (count * p) for i, p in enumerate(expected))
    assert chi_squared < 16.3  # 99.9 % of three degrees of freedom


def test_splitmix64_gives_its_published_sequence():
    assert [splitmix64(1234567, index) for index in range(5)] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


def test_uniform_numbers_are_uniform_and_never_change():
    # Another value here would change the output of every seeded request.
    assert uniform(0, 0) == 0.8833108082136426
    assert uniform(42, 7) == 0.15289334222649975
    numbers = [uniform(seed, position) for seed in range(100) for position in range(100)]
    assert all(0 <= u < 1 for u in numbers)
    assert len(set(numbers)) == len(numbers)
    for bucket, count in Counter(int(u * 10) for u in numbers).items():
        assert 880 < count < 1120, bucket
    assert uniform(-1, 0) == uniform(2**64 - 1, 0)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_unowned_and_banned_ids_are_never_chosen(temperature):
    logits = [[0.0, 1.0, 2.0, 50.0, 60.0]]
    for position in range(50):
        spec = SampleSpec(Sampling(temperature=temperature), position, (1, 4, 99))
        assert tokens(logits, [spec], owned={0, 1, 2}) in ([0], [2])
    many = SampleSpec(Sampling(top_k=5, top_p=0.99, seed=1), 0)
    assert tokens(logits, [many], owned=3)[0] < 3


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.0), Sampling(top_k=2)])
def test_nothing_left_to_choose_is_an_error_of_that_row(sampling):
    specs = [SampleSpec(sampling, 0, (0, 1, 2)), SampleSpec(sampling, 0)]
    banned, fine = sampler(3, 4).sample(torch.zeros(2, 4), specs)
    assert isinstance(banned, RowError)
    assert isinstance(fine, SampledToken)


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(
    "sampling",
    [Sampling(temperature=0.0), Sampling(), Sampling(top_k=3), Sampling(top_p=0.5, logprobs=2)],
)
def test_a_row_of_nan_harms_no_other(poison, sampling):
    logits = torch.randn(3, VOCAB)
    spec = SampleSpec(sampling, 1)
    expected = sampler().sample(logits.clone(), [spec] * 3)
    logits[1, 7] = poison
    found = sampler().sample(logits, [spec] * 3)
    assert isinstance(found[1], RowError)
    assert "NaN" in found[1].message
    assert [found[0], found[2]] == [expected[0], expected[2]]


@pytest.mark.parametrize("count", [0, 1, 5])
def test_logprobs_are_those_of_the_raw_logits(count):
    logits = torch.randn(2, VOCAB) * 3
    raw = logits.log_softmax(1)
    sampling = Sampling(temperature=0.4, top_k=3, seed=8, logprobs=count)
    found = sampler(owned=20).sample(logits, [SampleSpec(sampling, 0, (2,))] * 2)
    for row, result in zip(raw, found, strict=True):
        assert result.logprob == pytest.approx(float(row[result.token_id]), abs=1e-5)
        best = sorted(range(20), key=lambda i: -float(row[i]))[:count]
        assert [token for token, _ in result.top_logprobs] == best
        assert [p for _, p in result.top_logprobs] == pytest.approx(row[best].tolist(), abs=1e-5)


def test_no_logprobs_unless_asked_for():
    [result] = sampler().sample(torch.randn(1, VOCAB), [SampleSpec(Sampling(), 0)])
    assert result.logprob is None
    assert result.top_logprobs == ()
