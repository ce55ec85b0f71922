"""Checkpoints in float8 blocks: what is read equals the same weights multiplied out by hand."""

from __future__ import annotations

import random

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from qwen3_asgi.errors import ModelLoadError
from qwen3_asgi.model import memory
from qwen3_asgi.model.config import parse_model_config
from qwen3_asgi.model.fingerprint import fingerprint
from qwen3_asgi.model.fp8.blocks import STRIPE_ROWS, Blocks
from qwen3_asgi.model.fp8.checkpoint import Fp8Checkpoint
from qwen3_asgi.scheduler.plan import RequestId, Row
from tests.model.checkpoints import (
    VOCAB,
    edit_config,
    load,
    load_reference,
    reference_logits,
)
from tests.model.fp8_files import (
    QUANTIZATION,
    SIZES,
    by_hand,
    rewrite,
    separate_scales,
    write_pair,
)
from tests.model.test_config import variant

TOKENS = random.Random(5).choices(range(VOCAB), k=21)
PROJECTION = "model.layers.1.self_attn.k_proj.weight"
SCALES = PROJECTION + "_scale_inv"


@pytest.fixture
def ragged(tmp_path):
    return write_pair(tmp_path, "ragged").fp8


def logits(folder, **settings):
    executor = load(folder, **settings)
    return executor.forward_logits([Row(RequestId("a"), "prefill", TOKENS, 0, range(6), None)])


def blocks(rows, columns):
    generator = torch.Generator().manual_seed(rows + columns)
    values = torch.randn(rows, columns, generator=generator).to(torch.float8_e4m3fn)
    scales = torch.rand(-(-rows // 128), -(-columns // 128), generator=generator) + 0.5
    return Blocks(values, scales)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "shape", [(1, 1), (128, 128), (130, 257), (300, 100), (STRIPE_ROWS + 200, 140), (2100, 128)]
)
def test_each_value_is_multiplied_by_its_blocks_scale_and_rounded_once(shape, dtype):
    stored = blocks(*shape)
    assert torch.equal(stored.dequantize(dtype), by_hand(*stored).to(dtype))


class Allocations(TorchDispatchMode):
    """Records the largest float32 tensor that an operation returned, in values."""

    largest = 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        result = function(*arguments, **(keywords or {}))
        if isinstance(result, torch.Tensor) and result.dtype == torch.float32:
            self.largest = max(self.largest, result.numel())
        return result


def test_no_float32_copy_of_a_matrix_is_held():
    stored = blocks(5 * STRIPE_ROWS, 130)
    with Allocations() as allocations:
        stored.dequantize(torch.bfloat16)
    assert allocations.largest == STRIPE_ROWS * 130


@pytest.mark.parametrize("kind", ["tied", "untied_sharded"])
@pytest.mark.parametrize("size", SIZES)
def test_logits_are_those_of_the_weights_multiplied_out(size, kind, tmp_path):
    pair = write_pair(tmp_path, size, kind)
    if kind == "untied_sharded":
        assert len(list(pair.fp8.glob("*.safetensors"))) > 2
    expected = reference_logits(load_reference(pair.plain), TOKENS)
    found = logits(pair.fp8, dtype="float32")
    largest = float(expected.abs().max())
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * largest)
    assert torch.equal(found, logits(pair.plain, dtype="float32"))
    # And in bfloat16, where both are rounded once and then packed.
    assert torch.equal(logits(pair.fp8, dtype="bfloat16"), logits(pair.plain, dtype="bfloat16"))


def test_scales_may_be_in_another_file_than_what_they_scale(tmp_path):
    pair = write_pair(tmp_path, "ragged")
    separate_scales(pair.fp8)
    assert torch.equal(logits(pair.fp8), logits(pair.plain))


def test_scales_may_be_stored_in_bfloat16(tmp_path):
    pair = write_pair(tmp_path, "ragged", scales_type=torch.bfloat16)
    assert torch.equal(logits(pair.fp8), logits(pair.plain))


def test_a_matrix_may_be_left_unquantised(tmp_path):
    pair = write_pair(tmp_path, "ragged")
    exact = Fp8Checkpoint(pair.fp8).read(PROJECTION)

    def leave(tensors):
        tensors[PROJECTION] = exact
        del tensors[SCALES]

    rewrite(pair.fp8, leave)
    assert torch.equal(logits(pair.fp8), logits(pair.plain))


def test_a_tied_models_redundant_head_is_ignored_with_its_scales(ragged):
    before = logits(ragged)
    extra = {
        "lm_head.weight": torch.zeros(VOCAB, 200).to(torch.float8_e4m3fn),
        "lm_head.weight_scale_inv": torch.ones(3, 2),
    }
    rewrite(ragged, lambda tensors: tensors.update(extra))
    assert torch.equal(logits(ragged), before)


@pytest.mark.parametrize("named", [True, False])
def test_the_type_to_compute_in_is_that_of_what_is_not_quantised(named, ragged, monkeypatch):
    monkeypatch.setattr(memory, "SMALL_MODEL_PARAMETERS", 0)  # they compute in float32 by choice

    def convert(tensors):
        for name, tensor in tensors.items():
            if tensor.dtype == torch.float32 and not name.endswith("_scale_inv"):
                tensors[name] = tensor.bfloat16()

    rewrite(ragged, convert)
    edit_config(ragged, lambda raw: raw.pop("dtype"))
    if named:
        edit_config(ragged, lambda raw: raw.update(torch_dtype="bfloat16"))
    assert load(ragged).dtype == torch.bfloat16


def test_kv_files_of_other_weights_are_told_apart(tmp_path):
    pair = write_pair(tmp_path, "ragged")
    # With the same config, as far as a config can be the same.
    (pair.plain / "config.json").write_text((pair.fp8 / "config.json").read_text())

    def of(folder):
        return fingerprint(folder, ["model.safetensors"])

    before = of(pair.fp8)
    assert before != of(pair.plain)
    rewrite(pair.fp8, lambda tensors: tensors[SCALES].mul_(2))
    assert of(pair.fp8) != before


def replace_scales(tensor):
    return lambda tensors: tensors.update({SCALES: tensor})


# k_proj is [64, 200] here: one block of rows, two of columns.
@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda tensors: tensors.pop(SCALES), rf"'{SCALES}' of shape \[1, 2\] is missing"),
        (replace_scales(torch.ones(2, 1)), rf"'{SCALES}': expected shape \[1, 2\], found \[2, 1\]"),
        (replace_scales(torch.ones(1)), rf"'{SCALES}': expected shape \[1, 2\], found \[1\]"),
        (replace_scales(torch.ones(1, 2).to(torch.int8)), f"'{SCALES}': type I8 is not supported"),
        (
            lambda tensors: tensors.update({PROJECTION: torch.ones(64, 200)}),
            f"'{SCALES}': unexpected",
        ),
        (lambda tensors: tensors.pop(PROJECTION), f"'{PROJECTION}' .* is missing"),
        (
            lambda tensors: tensors.update(
                {"model.norm.weight": torch.ones(200).to(torch.float8_e4m3fn)}
            ),
            "'model.norm.weight': type F8_E4M3 is not supported.*for projections",
        ),
        (
            lambda tensors: tensors.update({PROJECTION: torch.ones(64, 200).to(torch.float8_e5m2)}),
            f"'{PROJECTION}': type F8_E5M2 is not supported",
        ),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(edit, message, ragged):
    rewrite(ragged, edit)
    with pytest.raises(ModelLoadError, match=message):
        load(ragged)


def test_float8_that_the_config_does_not_announce_is_refused(ragged):
    edit_config(ragged, lambda raw: raw.pop("quantization_config"))
    message = r"_proj\.weight': type F8_E4M3 is not supported.*quant_method 'fp8'"
    with pytest.raises(ModelLoadError, match=message):
        load(ragged)


def test_scales_that_the_config_does_not_announce_are_refused(tmp_path):
    folder = write_pair(tmp_path, "ragged").plain
    rewrite(folder, replace_scales(torch.ones(1, 2)))
    with pytest.raises(ModelLoadError, match=f"{SCALES}.*unexpected"):
        load(folder)


@pytest.mark.parametrize(
    "absent", ["activation_scheme", "fmt", "modules_to_not_convert", "weight_block_size"]
)
def test_entries_have_the_defaults_of_transformers(absent):
    entry = {key: value for key, value in QUANTIZATION.items() if key != absent}
    assert parse_model_config(variant(quantization_config=entry)).fp8


@pytest.mark.parametrize("entry", [None, {}])
def test_a_config_without_an_entry_announces_nothing(entry):
    assert not parse_model_config(variant(quantization_config=entry)).fp8


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"quant_method": "gptq"}, "quant_method 'gptq' is not supported, only 'fp8'"),
        ({"quant_method": "awq", "fmt": "x"}, "quant_method 'awq' is not supported, only 'fp8'"),
        ({"quant_method": None}, "quant_method None is not supported, only 'fp8'"),
        ({"fmt": "e5m2"}, "fmt 'e5m2' is not supported, only 'e4m3'"),
        (
            {"weight_block_size": [1, 32]},
            r"weight_block_size \[1, 32\] is not supported, only \[128, 128\]",
        ),
        ({"weight_block_size": None}, "weight_block_size None is not supported"),
        ({"activation_scheme": "static"}, "activation_scheme 'static' is not supported"),
        ({"scale_fmt": "ue8m0"}, "scale_fmt 'ue8m0' is not supported, only 'float'"),
    ],
)
def test_another_kind_of_quantisation_is_named(entries, message):
    with pytest.raises(ModelLoadError, match=f"quantization_config: {message}"):
        parse_model_config(variant(quantization_config=QUANTIZATION | entries))


def test_an_entry_that_is_no_object_is_named():
    with pytest.raises(ModelLoadError, match="must be an object, found 'fp8'"):
        parse_model_config(variant(quantization_config="fp8"))
