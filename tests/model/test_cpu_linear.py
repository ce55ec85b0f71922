"""The compiled linear layers, whole and in 8 bits, against plain torch."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from qwen3_asgi.model.cpu.linear import Int8Linear, PanelLinear, int8_linear, panel_linear
from qwen3_asgi.model.quantization import PlainInt8Linear, choose_linear, quantize_int8

DTYPES = [torch.bfloat16, torch.float32]
# Not a whole number of panels; one column; a depth of one vector.
SHAPES = [(200, 64), (1, 16), (64, 48), (130, 1024)]
CPU = torch.device("cpu")


@pytest.fixture
def int8(library):
    if not library.qwen3_has_int8():
        pytest.skip("this CPU has no AVX-512 VNNI")
    return library


def random(*shape, dtype, seed=1):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def off(found, expected):
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rows", [1, 2, 5, 6, 7, 8, 33, 250])
def test_a_product_is_that_of_plain_torch(library, rows, shape, dtype):
    weight, x = random(*shape, dtype=dtype), random(rows, shape[1], dtype=dtype, seed=2)
    found = PanelLinear(library, weight)(x)
    assert found.dtype == dtype
    assert found.shape == (rows, shape[0])
    # Rounded once, from sums in float32.
    limit = 1e-6 if dtype == torch.float32 else 4e-3
    expected = x.double() @ weight.double().T
    torch.testing.assert_close(
        found.double(), expected, rtol=limit, atol=limit * float(expected.abs().max())
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [PanelLinear, Int8Linear])
def test_a_row_does_not_depend_on_its_company_nor_on_the_threads(request, kind, dtype):
    library = request.getfixturevalue("int8" if kind is Int8Linear else "library")
    layer = kind(library, random(200, 64, dtype=dtype))
    x = random(250, 64, dtype=dtype, seed=2)
    whole = layer(x)
    for first, count in [(0, 1), (3, 2), (249, 1), (5, 6), (17, 8), (100, 120)]:
        assert torch.equal(layer(x[first : first + count]), whole[first : first + count])
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1 if threads > 1 else 2)
        assert torch.equal(layer(x), whole)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_the_weight_come_back_bit_for_bit(library, dtype):
    weight = random(200, 48, dtype=dtype)
    weight[7, 3] = float("nan")
    ids = torch.tensor([199, 0, 7, 63, 64, 7])
    found = PanelLinear(library, weight).rows(ids)
    assert torch.equal(found.view(torch.int16), weight[ids].view(torch.int16))


@pytest.mark.parametrize("ids", [[200], [-1], [0, 3, 1 << 40]])
def test_a_row_outside_the_weight_is_refused(library, ids):
    layer = PanelLinear(library, random(200, 48, dtype=torch.float32))
    with pytest.raises(IndexError, match="0 to 199"):
        layer.rows(torch.tensor(ids))


@pytest.mark.parametrize("kind", [PanelLinear, Int8Linear])
def test_what_does_not_fit_never_reaches_the_kernel(request, kind):
    library = request.getfixturevalue("int8" if kind is Int8Linear else "library")
    layer = kind(library, random(32, 64, dtype=torch.bfloat16))
    for x in (
        random(3, 48, dtype=torch.bfloat16),
        random(3, 64, dtype=torch.float32),
        random(64, dtype=torch.bfloat16),
    ):
        with pytest.raises(ValueError, match=r"expected \[T, 64\] in torch.bfloat16"):
            layer(x)
    assert layer(random(0, 64, dtype=torch.bfloat16)).shape == (0, 32)


@pytest.mark.parametrize("kind", [PanelLinear, Int8Linear])
def test_gaps_between_rows_do_not_matter(request, kind):
    library = request.getfixturevalue("int8" if kind is Int8Linear else "library")
    weight = random(24, 80, dtype=torch.bfloat16)
    x = random(5, 40, dtype=torch.bfloat16)
    layer = kind(library, weight[:, 16:32])
    same = kind(library, weight[:, 16:32].contiguous())
    assert torch.equal(layer(x[:, :16]), same(x[:, :16].contiguous()))


def test_weights_that_the_kernels_do_not_take_are_left_alone(library):
    assert panel_linear(random(8, 24, dtype=torch.bfloat16)) is None
    assert panel_linear(random(8, 32, dtype=torch.float16)) is None
    assert int8_linear(random(8, 24, dtype=torch.bfloat16)) is None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 40])
def test_eight_bits_are_the_same_with_and_without_a_kernel(int8, rows, dtype):
    weight, x = random(200, 1024, dtype=dtype), random(rows, 1024, dtype=dtype, seed=2)
    layer = Int8Linear(int8, weight)
    values, scales = quantize_int8(weight)
    expected = (x.double() @ values.double().T) * scales.double()
    # What 15 bits of an input lose, and the rounding of the result.
    limit = 1e-4 if dtype == torch.float32 else 4e-3
    assert off(layer(x), expected) < limit
    assert off(PlainInt8Linear(weight)(x), expected) < limit


@pytest.mark.parametrize("dtype", DTYPES)
def test_eight_bits_lose_one_percent(int8, dtype):
    """Of normally distributed weights, a step is 1/127 of the highest of 1024: about 0.8 %."""
    weight, x = random(200, 1024, dtype=dtype), random(9, 1024, dtype=dtype, seed=2)
    expected = x.double() @ weight.double().T
    for layer in (Int8Linear(int8, weight), PlainInt8Linear(weight)):
        assert 0.004 < off(layer(x), expected) < 0.012


def test_rows_of_zeros_and_rows_that_are_not_finite(int8):
    weight = random(70, 64, dtype=torch.bfloat16)
    weight[3] = 0
    x = random(5, 64, dtype=torch.bfloat16, seed=2)
    x[0] = 0
    x[1, 5] = float("inf")
    x[2, 6] = float("nan")
    x[4] *= 1e30
    y = Int8Linear(int8, weight)(x)
    assert not y[0].any()
    assert y[1].isnan().all()
    assert y[2].isnan().all()
    assert y[3:].isfinite().all()
    assert not y[3:, 3].any()
    assert off(y[4], x[4].double() @ weight.double().T) < 0.02


def test_a_single_large_input_costs_the_others_little(int8):
    """Activations of language models have outliers: the rest of the row keeps 15 bits of them."""
    weight, x = random(96, 1024, dtype=torch.bfloat16), random(4, 1024, dtype=torch.bfloat16)
    x[:, 17] = 300.0
    layer = Int8Linear(int8, weight)
    without = x.clone()
    without[:, 17] = 0
    values, scales = quantize_int8(weight)
    alone = (x[:, 17:18].double() @ values[:, 17:18].double().T) * scales.double()
    rest = layer(x).double() - alone
    expected = (without.double() @ values.double().T) * scales.double()
    # The result itself is rounded to 8 bits of several hundred.
    assert float((rest - expected).abs().max()) < 2**-8 * float(layer(x).abs().max())


def test_without_kernels_layers_are_plain(monkeypatch):
    from qwen3_asgi.model.cpu import linear

    monkeypatch.setattr(linear, "kernel_library", lambda: (None, "none wanted"))
    weight = random(32, 64, dtype=torch.bfloat16)
    x = random(3, 64, dtype=torch.bfloat16, seed=2)
    assert isinstance(choose_linear("int8", CPU)(weight), PlainInt8Linear)
    plain = choose_linear(None, CPU)(weight)
    torch.testing.assert_close(plain(x), functional.linear(x, weight), rtol=1e-2, atol=5e-2)
