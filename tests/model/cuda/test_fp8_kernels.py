"""The kernel that quantises activations against plain torch."""

from __future__ import annotations

import pytest
import torch

from qwen3_asgi.model.cuda import fp8
from qwen3_asgi.model.fp8.rows import quantize_rows
from tests.model.cuda.world import DEVICE, DTYPES, needs_kernels, random

pytestmark = needs_kernels


def representable(rows, width):
    """Values that float8 has, each group with the largest: its scale is a power of 2.

    Triton's interpreter rounds to float8 wrongly (7.9 becomes 4), so here nothing is to round.
    """
    generator = torch.Generator().manual_seed(rows)
    bits = torch.randint(8, 0x7F, (rows, width // 128, 128), generator=generator)
    x = bits.to(torch.uint8).view(torch.float8_e4m3fn).float()
    x *= torch.randint(0, 2, x.shape, generator=generator) * 2 - 1
    x[:, :, 17] = -448
    exponents = torch.randint(-9, 9, (rows, width // 128, 1), generator=generator)
    return (x * torch.exp2(exponents.float())).flatten(1).to(DEVICE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "width"), [(1, 512), (4, 384), (6, 1024), (9, 640)])
def test_values_and_scales_are_those_of_plain_torch(dtype, rows, width):
    x = representable(rows, width).to(dtype)
    found, wanted = fp8.quantize_rows(x), quantize_rows(x)
    assert torch.equal(found.values.float(), wanted.values.float())
    assert torch.equal(found.scales, wanted.scales)
    assert found.values.stride() == wanted.values.stride()
    assert found.scales.stride() == wanted.scales.stride()
    assert len(wanted.scales.unique()) > 2


@pytest.mark.parametrize("dtype", DTYPES)
def test_scales_of_any_values_are_those_of_plain_torch(dtype):
    x = random(6, 1024, dtype=dtype, seed=1)
    x[2, 128:256] = 0
    torch.testing.assert_close(fp8.quantize_rows(x).scales, quantize_rows(x).scales)


def test_rows_may_have_gaps_between_them():
    wide = representable(5, 1024).to(torch.bfloat16)
    found, wanted = fp8.quantize_rows(wide[:, :512]), quantize_rows(wide[:, :512])
    assert torch.equal(found.values.float(), wanted.values.float())
    assert torch.equal(found.scales, wanted.scales)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_hardware_rounds_as_plain_torch_does():
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("no float8 on a device of less than compute capability 8.9")
    x = random(64, 4096, dtype=torch.bfloat16, seed=2)
    found, wanted = fp8.quantize_rows(x), quantize_rows(x)
    torch.testing.assert_close(found.scales, wanted.scales)
    # A quotient that differs by its last bit may fall to the other side of a half step.
    differ = (found.values.float() != wanted.values.float()).float().mean()
    assert float(differ) < 1e-3
