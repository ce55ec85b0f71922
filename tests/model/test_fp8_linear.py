"""Products in float8. The CPU has no such kernel, so a stand-in checks what it would be given."""

from __future__ import annotations

import pytest
import torch

from qwen3_asgi.model import executor, weights
from qwen3_asgi.model.fp8 import linear
from qwen3_asgi.model.fp8.blocks import Blocks
from qwen3_asgi.model.fp8.linear import (
    Fp8Linear,
    fit,
    multiplies_fp8,
    reference_product,
    trial,
)
from qwen3_asgi.model.fp8.rows import quantize_rows
from qwen3_asgi.model.linear import Linear
from qwen3_asgi.scheduler.plan import RequestId, Row
from tests.model.checkpoints import load
from tests.model.fp8_files import by_hand, rewrite, write_pair

CPU = torch.device("cpu")
BF16 = torch.bfloat16
FLOAT8 = torch.float8_e4m3fn


def random(*shape, dtype=BF16, seed=1):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def matrix(rows, columns, seed=2):
    generator = torch.Generator().manual_seed(seed)
    scales = torch.rand(rows // 128, columns // 128, generator=generator) + 0.5
    return Blocks(random(rows, columns, dtype=FLOAT8, seed=seed), scales)


def scaled_mm(a, b, *, scale_a, scale_b, out_dtype):
    """`torch._scaled_mm` for 1 x 128 and 128 x 128 scales, refusing what cuBLASLt's layout is not.

    Layouts: https://docs.nvidia.com/cuda/cublas/#scaling-factors-layouts
    """
    (rows, inner), columns = a.shape, b.shape[1]
    groups = inner // 128
    assert a.dtype == b.dtype == FLOAT8
    assert scale_a.dtype == scale_b.dtype == torch.float32
    assert a.stride() == (inner, 1)
    assert b.stride() == (1, inner)
    assert rows % 4 == inner % 128 == columns % 16 == 0
    assert (scale_a.shape, scale_a.stride()) == ((rows, groups), (1, rows))
    assert scale_b.shape == (groups, -(-columns // 128))
    assert scale_b.stride() == (1, -(-groups // 4) * 4)
    exact = a.float() * scale_a.repeat_interleave(128, 1)
    weight = b.float() * scale_b.repeat_interleave(128, 0).repeat_interleave(128, 1)
    return (exact @ weight).to(out_dtype)


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)


def test_quantised_rows_keep_three_bits_of_what_they_were():
    x = random(8, 512)
    values, scales = quantize_rows(x)
    assert values.dtype == FLOAT8
    assert (scales.dtype, scales.shape, scales.stride()) == (torch.float32, (8, 4), (1, 8))
    # Half a step of e4m3 is 1/16 of a value, or of the smallest normal one, 2^-6.
    step = scales.repeat_interleave(128, 1) * 2**-6
    error = (values.float() * scales.repeat_interleave(128, 1) - x.float()).abs()
    assert bool((error <= torch.maximum(x.float().abs(), step) / 16 * 1.0001).all())


def test_each_128_columns_have_a_scale_of_their_own():
    x = random(4, 512)
    values, scales = quantize_rows(x)
    loud = x.clone()
    loud[1, 128:256] *= 1000
    loud_values, loud_scales = quantize_rows(loud)
    others = torch.ones(4, 4, dtype=torch.bool)
    others[1, 1] = False
    assert torch.equal(loud_scales[others], scales[others])
    assert float(loud_scales[1, 1]) > 900 * float(scales[1, 1])
    other_columns = others.repeat_interleave(128, 1)
    assert torch.equal(loud_values.float()[other_columns], values.float()[other_columns])


def test_every_group_uses_the_whole_range_and_nothing_overflows():
    x = torch.cat([random(200, 512, dtype=torch.float32, seed=s) * 10.0**s for s in range(-9, 9)])
    values, scales = quantize_rows(x)
    peaks = values.float().reshape(len(x), 4, 128).abs().amax(-1)
    assert bool((peaks == 448).all())
    torch.testing.assert_close(scales * 448, x.reshape(len(x), 4, 128).abs().amax(-1))


def test_zeros_stay_zeros():
    values, scales = quantize_rows(torch.zeros(4, 512, dtype=BF16))
    assert bool((values.float() == 0).all())
    assert bool((scales > 0).all())


@pytest.mark.parametrize("rows", [1, 4, 6])
def test_rows_are_filled_up_with_zeros_to_a_multiple_of_four(rows):
    x = random(rows, 256)
    values, scales = quantize_rows(x)
    assert len(values) == len(scales) == -(-rows // 4) * 4
    assert bool((values[rows:].float() == 0).all())
    whole = quantize_rows(torch.cat([x, random(8, 256)]))
    assert torch.equal(values[:rows].float(), whole.values[:rows].float())
    assert torch.equal(scales[:rows], whole.scales[:rows])


@pytest.mark.parametrize("rows", [1, 3, 4, 9])
def test_a_product_is_that_of_the_weights_multiplied_out(rows, kernel):
    weight, x = matrix(384, 1024), random(rows, 1024)
    layer = Fp8Linear([weight])
    found = layer(x)
    assert layer.shape == (384, 1024)
    assert (found.shape, found.dtype, found.is_contiguous()) == ((rows, 384), BF16, True)
    torch.testing.assert_close(found, reference_product(x, weight).to(BF16), rtol=1e-2, atol=1e-1)
    exact = x.float() @ by_hand(*weight).T
    # 1/16 at most for each factor, so about 1/40 for the sum of many.
    assert float((found.float() - exact).std() / exact.std()) < 0.04


def test_rows_do_not_depend_on_each_other(kernel):
    layer, x = Fp8Linear([matrix(256, 512)]), random(7, 512)
    together = layer(x)
    for i in range(7):
        torch.testing.assert_close(layer(x[i : i + 1]), together[i : i + 1])


def test_a_product_does_not_care_about_gaps_between_rows(kernel):
    layer, x = Fp8Linear([matrix(256, 512)]), random(5, 700)
    assert torch.equal(layer(x[:, :512]), layer(x[:, :512].contiguous()))


def test_stacked_parts_are_multiplied_each_with_its_own_scales(kernel):
    parts = [matrix(rows, 512, seed) for seed, rows in enumerate([256, 128, 384])]
    x = random(4, 512)
    alone = [Fp8Linear([part])(x) for part in parts]
    torch.testing.assert_close(Fp8Linear(parts)(x), torch.cat(alone, 1))


@pytest.mark.parametrize("rows", [1, 4, 6])
def test_torchs_own_check_of_shapes_accepts_the_call(rows):
    """On the meta device nothing is computed, but what CUDA would be given is checked."""
    layer = Fp8Linear([Blocks(*(each.to("meta") for each in matrix(384, 1024)))])
    found = layer(torch.empty(rows, 1024, dtype=BF16, device="meta"))
    assert (found.shape, found.dtype) == ((rows, 384), BF16)


@pytest.mark.parametrize(
    ("shapes", "fits"),
    [
        ([(256, 512), (128, 512)], True),
        ([(192, 512), (64, 512)], False),
        ([(256, 640)], False),
        ([(256, 500)], False),
    ],
)
def test_parts_that_end_inside_a_block_are_not_stacked(shapes, fits):
    parts = [
        Blocks(torch.empty(shape, dtype=FLOAT8), torch.empty(-(-shape[0] // 128), shape[1] // 128))
        for shape in shapes
    ]
    assert fit(parts) is fits


def test_a_kernel_that_is_right_is_used(kernel):
    assert trial(CPU)


def test_a_kernel_that_reads_the_scales_wrongly_is_not_used(monkeypatch):
    def wrong(a, b, *, scale_a, scale_b, out_dtype):
        reordered = scale_b.t().contiguous().flatten().view(scale_b.shape).t().contiguous().t()
        return scaled_mm(a, b, scale_a=scale_a, scale_b=reordered, out_dtype=out_dtype)

    monkeypatch.setattr(torch, "_scaled_mm", wrong)
    assert not trial(CPU)


@pytest.mark.parametrize("error", [RuntimeError, AttributeError, KeyError])
def test_a_kernel_that_is_missing_is_not_used(error, monkeypatch):
    def missing(*arguments, **keywords):
        raise error("not on this device")

    monkeypatch.setattr(torch, "_scaled_mm", missing)
    assert not trial(CPU)


def test_only_bfloat16_on_cuda_is_tried(monkeypatch):
    monkeypatch.setattr(linear, "trial", lambda device: True)
    assert multiplies_fp8(torch.device("cuda"), BF16)
    assert not multiplies_fp8(torch.device("cuda"), torch.float32)
    assert not multiplies_fp8(CPU, BF16)


def layers_of(loaded):
    model, _ = loaded._loaded
    return model._weights.layers


def logits(loaded):
    row = Row(RequestId("a"), "prefill", list(range(3, 24)), 0, range(6), None)
    return loaded.forward_logits([row])


@pytest.fixture
def fp8_device(kernel, monkeypatch):
    """A CPU that is taken for a device with float8 kernels, and without kernels of its own."""
    monkeypatch.setattr(weights, "multiplies_fp8", lambda device, dtype: dtype == BF16)
    monkeypatch.setattr(executor, "choose_linear", lambda *arguments, **keywords: Linear)


def test_a_model_that_stays_in_float8_answers_nearly_the_same(fp8_device, tmp_path):
    pair = write_pair(tmp_path, "even")
    converted = logits(load(pair.plain, dtype="bfloat16"))
    stays = load(pair.fp8, dtype="bfloat16")
    for layer in layers_of(stays):
        assert {type(each) for each in (layer.qkv, layer.output, layer.gate_up, layer.down)} == {
            Fp8Linear
        }
    found = logits(stays)
    assert not torch.equal(found, converted)
    assert float(torch.corrcoef(torch.stack([found.flatten(), converted.flatten()]))[0, 1]) > 0.99


def test_what_does_not_fit_is_converted(fp8_device, tmp_path):
    pair = write_pair(tmp_path, "ragged")
    converted = load(pair.fp8, dtype="bfloat16")
    assert {type(layer.qkv) for layer in layers_of(converted)} == {Linear}
    assert torch.equal(logits(converted), logits(load(pair.plain, dtype="bfloat16")))


def test_a_layer_of_which_a_part_is_not_quantised_is_converted(fp8_device, tmp_path):
    pair = write_pair(tmp_path, "even")
    name = "model.layers.1.mlp.up_proj.weight"

    def leave(tensors):
        tensors[name] = by_hand(tensors[name], tensors.pop(name + "_scale_inv"))

    rewrite(pair.fp8, leave)
    first, second = layers_of(load(pair.fp8, dtype="bfloat16"))
    assert isinstance(first.gate_up, Fp8Linear)
    assert isinstance(second.gate_up, Linear)
    assert isinstance(second.down, Fp8Linear)


def test_float8_weights_do_not_change_with_their_file(fp8_device, tmp_path):
    pair = write_pair(tmp_path, "even")
    stays = load(pair.fp8, dtype="bfloat16")
    before = logits(stays)
    path = pair.fp8 / "model.safetensors"
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 8)
        file.write(b"\x00" * (path.stat().st_size * 7 // 8))
    assert torch.equal(logits(stays), before)


def test_layers_that_were_asked_for_are_not_replaced_by_float8(kernel, monkeypatch, tmp_path):
    monkeypatch.setattr(weights, "multiplies_fp8", lambda device, dtype: True)
    invariant = load(write_pair(tmp_path, "even").fp8, dtype="bfloat16", batch_invariant=True)
    assert Fp8Linear not in {type(layer.down) for layer in layers_of(invariant)}


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
class TestOnCuda:
    @pytest.fixture
    def cuda(self):
        device = torch.device("cuda")
        if not trial(device):
            capability = torch.cuda.get_device_capability()
            pytest.skip(
                f"no block-wise float8 product: capability {capability}, {torch.__version__}"
            )
        return device

    @pytest.mark.parametrize("rows", [1, 2, 5, 64, 513])
    @pytest.mark.parametrize("shape", [(128, 512), (384, 1024), (4096, 2560), (2560, 9728)])
    def test_the_real_kernel_computes_the_reference(self, cuda, shape, rows):
        weight = matrix(*shape).to(cuda)
        x = random(rows, shape[1]).to(cuda)
        found, expected = Fp8Linear([weight])(x).float(), reference_product(x, weight)
        assert float((found - expected).abs().max() / expected.abs().max()) < 1e-2

    def test_hopper_has_it(self):
        if torch.cuda.get_device_capability() != (9, 0):
            pytest.skip("not a device of compute capability 9.0")
        if tuple(map(int, (torch.version.cuda or "0.0").split(".")[:2])) < (12, 9):
            pytest.skip("this build of torch has a CUDA older than 12.9")
        assert trial(torch.device("cuda"))

    def test_a_captured_product_is_the_same(self, cuda):
        layer, x = Fp8Linear([matrix(384, 1024).to(cuda)]), random(3, 1024).to(cuda)
        expected = layer(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = layer(x)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(found, expected)
