"""Greedy tokens of the compiled pass, against plain torch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qwen3_asgi.model.cpu.greedy import NO_TOKEN, NOT_FINITE, CpuGreedy

DTYPES = [torch.bfloat16, torch.float32]


@st.composite
def rows_and_ids(draw):
    vocab = draw(st.integers(1, 70))
    # Few values, so that maxima are equal, of ids to choose from and of others.
    logit = st.sampled_from([-2.5, -1.0, -0.0, 0.0, 0.5, 3.0])
    rows = draw(st.lists(st.lists(logit, min_size=vocab, max_size=vocab), min_size=1, max_size=3))
    ids = draw(st.sets(st.integers(0, vocab - 1)))
    return rows, ids


@settings(max_examples=300, deadline=None)
@given(given=rows_and_ids(), dtype=st.sampled_from(DTYPES))
def test_the_lowest_of_the_highest_that_may_be_chosen(library, given, dtype):
    rows, ids = given
    found = CpuGreedy(library, len(rows[0]), ids)(torch.tensor(rows, dtype=dtype))
    wanted = [min(ids, key=lambda i: (-row[i], i)) if ids else NO_TOKEN for row in rows]
    assert found == wanted


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")])
def test_a_logit_that_is_none_is_seen_wherever_it_stands(library, poison, dtype):
    vocab = 37
    greedy = CpuGreedy(library, vocab, range(3, 20))
    for place in range(vocab):
        logits = torch.zeros(2, vocab, dtype=dtype)
        logits[0, place] = poison
        assert greedy(logits) == [NOT_FINITE, 3], place


def test_the_widest_finite_logits_are_finite(library):
    logits = torch.full((1, 40), torch.finfo(torch.float32).max)
    assert CpuGreedy(library, 40, range(40))(logits) == [0]
    assert CpuGreedy(library, 40, [39])(-logits) == [39]


@pytest.mark.parametrize(
    "logits", [torch.zeros(2, 7), torch.zeros(8), torch.zeros(2, 8, dtype=torch.float64)]
)
def test_what_does_not_fit_never_reaches_the_library(logits):
    with pytest.raises(ValueError, match="expected"):
        CpuGreedy(None, 8, range(8))(logits)


@pytest.mark.parametrize("wrong", [-1, 8])
def test_an_id_outside_the_vocabulary_is_refused(wrong):
    with pytest.raises(ValueError, match=f"id {wrong}"):
        CpuGreedy(None, 8, [0, wrong])
