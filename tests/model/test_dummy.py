from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from qwen3_asgi import Engine, EngineConfig, SamplingParams
from qwen3_asgi.errors import ModelLoadError
from qwen3_asgi.model import dummy
from qwen3_asgi.model.config import load_generation_defaults, parse_model_config
from qwen3_asgi.model.dummy import DummyCheckpoint
from qwen3_asgi.model.executor import load_executor
from qwen3_asgi.model.shapes import DEFAULTS, named_shape
from qwen3_asgi.model.weights import tensor_shapes
from qwen3_asgi.scheduler.plan import RequestId, Row
from qwen3_asgi.tiny import tiny_path
from tests.model.fp8_files import QUANTIZATION
from tests.model.test_config import QWEN3_0_6B

CPU = torch.device("cpu")
# The published sizes, in billions.
PARAMETERS = {"0.6B": 0.596, "1.7B": 1.721, "4B": 4.022, "8B": 8.191, "14B": 14.768, "32B": 32.762}
SMALL = replace(
    named_shape("Qwen3-0.6B"), vocab_size=3000, hidden_size=128, num_layers=3, intermediate_size=256
)
DUMMY = EngineConfig(device="cpu", load_format="dummy", num_kv_blocks=16)


@pytest.mark.parametrize("size", PARAMETERS)
def test_every_shape_has_the_published_number_of_weights(size):
    shape = named_shape(f"Qwen3-{size}")
    weights = sum(math.prod(tensor) for tensor in tensor_shapes(shape).values())
    assert round(weights / 1e9, 3) == PARAMETERS[size]
    assert named_shape(f"Qwen/Qwen3-{size}") == shape


def test_what_the_shapes_have_in_common_is_that_of_the_hubs_files(tmp_path):
    parsed = parse_model_config(QWEN3_0_6B)
    shape = named_shape("Qwen3-0.6B")
    assert replace(shape, eos_token_ids=parsed.eos_token_ids) == parsed
    generation = {
        "bos_token_id": 151643,
        "do_sample": True,
        "eos_token_id": [151645, 151643],
        "pad_token_id": 151643,
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
    }
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert load_generation_defaults(tmp_path, parsed) == DEFAULTS
    assert shape.eos_token_ids == DEFAULTS.eos_token_ids


def test_no_published_shapes_rows_come_around_in_the_pool():
    widths = {
        tensor[1]
        for size in PARAMETERS
        for tensor in tensor_shapes(named_shape(f"Qwen3-{size}")).values()
        if len(tensor) == 2
    }
    assert {math.gcd(width, dummy.POOL_SIZE) for width in widths} == {1}


def test_an_unknown_name_is_told_the_known_ones():
    with pytest.raises(ModelLoadError, match=r"'Qwen3-5B' is neither .*Qwen3-0\.6B.*Qwen3-32B"):
        Engine("Qwen3-5B", DUMMY).start_sync()


def test_weights_are_seeded_and_no_two_rows_are_equal(monkeypatch):
    monkeypatch.setattr(dummy, "POOL_SIZE", 4099)  # far smaller than a matrix
    source, again = (DummyCheckpoint(SMALL, torch.float32, CPU) for _ in range(2))
    for name, shape in tensor_shapes(SMALL).items():
        tensor = source.read(name)
        assert tensor.shape == shape
        assert torch.equal(tensor, again.read(name))
        if len(shape) == 2:
            assert len(tensor.unique(dim=0)) == shape[0]
            spread = shape[1] ** -0.5 * (2 if "embed" in name else 1)
            assert 0.9 < float(tensor.std()) / spread < 1.1


def test_no_two_tensors_are_equal():
    source = DummyCheckpoint(SMALL, torch.float32, CPU)
    matrices = [name for name, shape in tensor_shapes(SMALL).items() if len(shape) == 2]
    # Divided by the first: widths have scales of their own, which would hide that they are equal.
    beginnings = [source.read(name).flatten()[:8] for name in matrices]
    assert len({tuple((each / each[0]).round(decimals=3).tolist()) for each in beginnings}) == len(
        matrices
    )


def test_tensors_share_no_memory():
    source = DummyCheckpoint(SMALL, torch.bfloat16, CPU)
    tensors = [source.read(name) for name in tensor_shapes(SMALL)]
    spans = sorted((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in tensors)
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layers", [3, 64])
def test_logits_look_like_a_models_however_deep_it_is(dtype, layers):
    shape = replace(SMALL, num_layers=layers)
    executor = load_executor(shape, replace(DUMMY, dtype=dtype), owned_token_ids=shape.vocab_size)
    row = Row(RequestId("a"), "prefill", list(range(0, 2900, 100)), 0, [0, 1], None)
    logits = executor.forward_logits([row])
    assert bool(logits.isfinite().all())
    assert 1 < float(logits.std()) < 4
    assert len(logits.argmax(dim=1).unique()) > 4  # not the same answer to everything


def test_a_folder_with_nothing_but_a_config_will_do(tmp_path):
    raw = json.loads(Path(tiny_path(), "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"vocab_size": 5000}))
    with Engine(str(tmp_path), DUMMY) as engine:
        params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
        output = engine.generate_sync(prompt_token_ids=[4999, 3], params=params)
        assert len(output.token_ids) == 20
        beyond = [i for i in output.token_ids if i >= 1984]
        assert beyond  # otherwise the next line says nothing
        assert all(f" {i}" in output.text for i in beyond)


def test_an_announced_quantisation_makes_no_difference(tmp_path):
    raw = json.loads(Path(tiny_path(), "config.json").read_text())
    logits = []
    for name, entries in {"plain": {}, "fp8": {"quantization_config": QUANTIZATION}}.items():
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(raw | entries))
        executor = load_executor(folder, DUMMY, owned_token_ids=100)
        row = Row(RequestId("a"), "prefill", [5, 6, 7], 0, [0], None)
        logits.append(executor.forward_logits([row]))
    assert torch.equal(*logits)


def test_a_vocabulary_that_is_too_small_for_the_tokenizer_is_refused(tmp_path):
    raw = json.loads(Path(tiny_path(), "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"vocab_size": 100}))
    with pytest.raises(ModelLoadError, match="vocab_size is 100, less than the tokenizer's"):
        Engine(str(tmp_path), DUMMY).start_sync()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"load_format": "gguf"}, "load_format must be 'auto' or 'dummy', got 'gguf'"),
        ({"load_format": "dummy", "kv_file": "x"}, "kv_file is of no use"),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        EngineConfig(**settings)
