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
from qwen3_asgi.model.dummy import DummyCheckpoint
from qwen3_asgi.model.executor import load_executor
from qwen3_asgi.model.shapes import named_shape
from qwen3_asgi.model.weights import tensor_shapes
from qwen3_asgi.scheduler.plan import RequestId, Row
from qwen3_asgi.tiny import tiny_path

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
