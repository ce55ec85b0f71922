"""The device's sampler gives what the host's gives, row for row; it runs on the CPU as well."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qwen3_asgi.model.cuda.reading import ReadingStep
from qwen3_asgi.model.cuda.sampling import NO_TOKEN_BEFORE, DeviceSamples, Wishes, ranked, sample
from qwen3_asgi.model.sampler import RowError, Sampler
from qwen3_asgi.scheduler.plan import RequestId, SampleSpec, Sampling

CPU = torch.device("cpu")
DEVICES = [
    CPU,
    pytest.param(
        torch.device("cuda"),
        marks=[
            pytest.mark.cuda,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
        ],
    ),
]
VOCAB = 24
OWNED = 21

# Quarters: exact in float32, with plenty of ties, -0.0 among them.
LOGITS = st.lists(
    st.integers(-20, 20).map(lambda n: n / 4) | st.just(-0.0), min_size=VOCAB, max_size=VOCAB
)
SPECS = st.builds(
    SampleSpec,
    st.builds(
        Sampling,
        temperature=st.sampled_from([0.0, 1e-3, 0.7, 1.0, 3.0]),
        top_k=st.sampled_from([-1, 0, 1, 2, 7, VOCAB - 1, VOCAB, 50]),
        top_p=st.sampled_from([1e-6, 0.31, 0.77, 0.99, 1.0]),
        min_p=st.sampled_from([0.0, 0.013, 0.37, 1.0]),
        seed=st.integers(0, 2**64 - 1),
        logprobs=st.sampled_from([None, 0, 3, 50]),
    ),
    st.integers(0, 1000),
    st.lists(st.integers(-1, VOCAB), max_size=4).map(tuple),
)


def on_host(rows, specs):
    found = Sampler(VOCAB, OWNED, CPU).sample(rows.clone(), specs)
    return [r.message if isinstance(r, RowError) else r for r in found]


def on_device(rows, specs, device=CPU):
    unowned = torch.arange(OWNED, VOCAB, device=device)
    ids = [RequestId(str(i)) for i in range(len(specs))]
    samples = sample(rows.to(device).clone(), Wishes.of(specs, VOCAB, device), unowned)
    result = ReadingStep(ids, [s.sampling.logprobs for s in specs], samples).result()
    assert len(result.tokens) + len(result.errors) == len(ids)
    return [result.tokens.get(i) or result.errors[i] for i in ids]


def same(found, wanted):
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        if isinstance(other, str):
            assert one == other
            continue
        assert one.token_id == other.token_id
        if other.logprob is None:
            assert one.logprob is None
        else:
            assert one.logprob == pytest.approx(other.logprob, abs=1e-5)
        assert [i for i, _ in one.top_logprobs] == [i for i, _ in other.top_logprobs]
        assert [p for _, p in one.top_logprobs] == pytest.approx(
            [p for _, p in other.top_logprobs], abs=1e-5
        )


@settings(deadline=None, max_examples=150)
@given(st.lists(st.tuples(LOGITS, SPECS), min_size=1, max_size=5))
def test_every_row_gets_the_token_and_logprobs_of_the_host_sampler(drawn):
    rows = torch.tensor([logits for logits, _ in drawn])
    specs = [spec for _, spec in drawn]
    same(on_device(rows, specs), on_host(rows, specs))


@pytest.mark.parametrize("device", DEVICES)
def test_a_thousand_rows_of_continuous_logits(device):
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(1000, VOCAB, generator=generator) * 4
    specs = [
        SampleSpec(Sampling((0, 0.6, 1.0)[i % 3], (0, 5)[i % 2], (1.0, 0.9)[i // 2 % 2], seed=i), i)
        for i in range(1000)
    ]
    same(on_device(rows, specs, device), on_host(rows, specs))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_bad_row_is_flagged_and_its_neighbours_are_unharmed(bad, device):
    rows = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(1))
    rows[1, 5] = bad
    specs = [SampleSpec(Sampling(1.0, top_p=0.9, seed=i, logprobs=2), 0) for i in range(3)] + [
        SampleSpec(Sampling(0.0), 0, tuple(range(OWNED)))
    ]
    found = on_device(rows, specs, device)
    assert found[1] == "the model produced NaN or infinite logits"
    assert found[3] == "every token is banned or unowned"
    same(found, on_host(rows, specs))


def test_ranking_is_by_logit_then_id_for_every_float():
    row = torch.tensor([[0.0, -0.0, -1.5, 3e38, -3e38, 1e-42, -1e-42, float("-inf"), 3e38, -1.5]])
    ids, logits = ranked(row, 10)
    assert ids.tolist() == [[3, 8, 5, 0, 1, 6, 2, 9, 4, 7]]
    assert torch.equal(logits, row.gather(1, ids))
    assert ranked(row, 4)[0].tolist() == [[3, 8, 5, 0]]


def test_a_row_whose_token_never_came_is_reported():
    samples = DeviceSamples(torch.tensor([4, NO_TOKEN_BEFORE, 9]), None)
    result = ReadingStep([RequestId("a"), RequestId("b")], [None, None], samples).result()
    assert result.tokens["a"].token_id == 4
    assert result.errors == {"b": "the step before gave it no token"}
    assert len(result.tokens) == 1
