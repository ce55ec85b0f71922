from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from qwen3_asgi.model import linear
from qwen3_asgi.model.linear import Linear


def random(*shape, dtype):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize("rows", [1, 2, 8, 33, 130])
def test_packed_product_equals_the_plain_one_in_bf16(rows):
    weight = random(192, 64, dtype=torch.bfloat16)
    x = random(rows, 64, dtype=torch.bfloat16)
    layer = Linear(weight)
    if not layer.is_packed:
        pytest.skip("this build of torch cannot pack bf16 weights")
    torch.testing.assert_close(layer(x), functional.linear(x, weight), rtol=1e-2, atol=5e-2)
    assert layer._weight is None


def test_float32_is_left_to_torch():
    weight, x = random(24, 16, dtype=torch.float32), random(3, 16, dtype=torch.float32)
    layer = Linear(weight)
    assert not layer.is_packed
    assert torch.equal(layer(x), functional.linear(x, weight))


def test_a_packed_product_that_is_wrong_is_not_used(monkeypatch):
    monkeypatch.setattr(
        linear, "_packed_product", lambda x, packed: torch.zeros(len(x), 24, dtype=x.dtype)
    )
    weight = random(24, 16, dtype=torch.bfloat16)
    layer = Linear(weight)
    assert not layer.is_packed
    assert layer(weight[:2]).shape == (2, 24)


def test_missing_operators_fall_back(monkeypatch):
    def missing(x, packed):
        raise AttributeError("no such operator")

    monkeypatch.setattr(linear, "_packed_product", missing)
    assert not Linear(random(24, 16, dtype=torch.bfloat16)).is_packed


def test_a_product_does_not_care_about_gaps_between_rows():
    weight = random(24, 16, dtype=torch.bfloat16)
    x = random(5, 40, dtype=torch.bfloat16)
    layer = Linear(weight)
    torch.testing.assert_close(layer(x[:, :16]), layer(x[:, :16].contiguous()))
