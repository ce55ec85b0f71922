"""`bench make-model`: a folder that this package and transformers run alike, to the last token."""

from __future__ import annotations

import json

import pytest

from qwen3_asgi import Engine, EngineConfig, SamplingParams
from qwen3_asgi.bench.made_model import make_model
from qwen3_asgi.cli import main
from qwen3_asgi.text.tokenizer import Tokenizer

pytestmark = pytest.mark.torch

PROMPT = "time year people"
ENDS = ("<|im_end|>", "<|endoftext|>")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("made") / "model"
    assert main(["bench", "make-model", "tiny", str(path)]) == 0
    return path


def test_both_load_it_and_say_the_same(folder):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer(PROMPT, return_tensors="pt")
    said = theirs.generate(**inputs, max_new_tokens=24, do_sample=False)[0].tolist()
    config = EngineConfig(device="cpu", dtype="float32", num_kv_blocks=16)
    with Engine(str(folder), config) as engine:
        # Without ignore_eos: the other server may not know it.
        params = SamplingParams(max_tokens=24, temperature=0)
        ours = engine.generate_sync(prompt=PROMPT, params=params)
        count = ours.prompt_tokens
        assert said[:count] == engine.tokenizer.encode(PROMPT)
    assert list(ours.token_ids) == said[count:]
    assert ours.finish_reason == "length"
    assert ours.text == tokenizer.decode(said[count:])


def test_no_answer_ends_early_and_every_token_can_be_seen(folder):
    from qwen3_asgi.engine.loading import load_model
    from qwen3_asgi.scheduler.plan import RequestId, Row

    loaded = load_model(str(folder), EngineConfig(device="cpu", dtype="float32", num_kv_blocks=16))
    tokenizer = loaded.tokenizer
    assert loaded.eos_token_ids
    rows = [Row(RequestId("r"), "prefill", list(range(200)), 0, list(range(13)), None)]
    logits = loaded.executor.forward_logits(rows)
    loaded.executor.close()
    # What ends an answer is not even near the best, at any position.
    assert logits[:, list(loaded.eos_token_ids)].abs().max() == 0
    assert logits.max(dim=1).values.min() > 2
    assert tokenizer.vocab_size == logits.shape[1]
    assert {tokenizer.token_id(name) for name in ENDS} == set(loaded.eos_token_ids)
    made_up = Tokenizer.from_folder(folder).decode([1950, 1983])
    assert made_up == " w1950 w1983"


def test_the_named_shapes_are_those_of_the_package(tmp_path, monkeypatch):
    from qwen3_asgi.model import dummy_folder, shapes
    from qwen3_asgi.model.checkpoint import Checkpoint
    from qwen3_asgi.model.config import load_model_config
    from qwen3_asgi.model.weights import tensor_shapes

    # As Qwen3-32B in the keys, in several files, of a size that a test can write.
    small = shapes._Size(hidden=64, layers=3, heads=8, intermediate=96, tied=False)
    monkeypatch.setitem(shapes._SIZES, "Qwen3-32B", small)
    monkeypatch.setattr(shapes, "named_shape", with_vocab(shapes.named_shape, 2048))
    monkeypatch.setattr(dummy_folder, "SHARD_BYTES", 300_000)
    size = make_model("Qwen3-32B", tmp_path / "m")
    config = load_model_config(tmp_path / "m")
    assert (config.hidden_size, config.num_layers, config.tie_word_embeddings) == (64, 3, False)
    assert config.rope.theta == 1_000_000
    checkpoint = Checkpoint(tmp_path / "m")
    checkpoint.check(tensor_shapes(config))
    assert len(checkpoint.file_names) > 1
    files = (tmp_path / "m").glob("*.safetensors")
    assert 0 < sum(file.stat().st_size for file in files) - size < 10_000
    ends = list(config.eos_token_ids)
    assert not checkpoint.read("lm_head.weight")[ends].any()
    assert checkpoint.read("model.embed_tokens.weight")[ends].any()


def with_vocab(named, size):
    from dataclasses import replace

    return lambda name: replace(named(name), vocab_size=size)


def test_what_is_there_is_not_overwritten(folder, capsys):
    before = (folder / "config.json").read_bytes()
    assert main(["bench", "make-model", "tiny", str(folder)]) == 1
    assert f"{folder} is not an empty folder" in capsys.readouterr().err
    assert (folder / "config.json").read_bytes() == before


def test_an_unknown_shape_is_one_clear_line(tmp_path, capsys):
    assert main(["bench", "make-model", "Qwen3-5B", str(tmp_path / "m")]) == 1
    error = capsys.readouterr().err
    assert "'Qwen3-5B'" in error
    assert "Qwen3-0.6B" in error
    assert not (tmp_path / "m").exists()


def test_what_was_written_is_told(tmp_path, capsys):
    assert main(["bench", "make-model", "tiny", str(tmp_path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["name"], told["folder"]) == ("tiny", str(tmp_path))
    assert told["weight_bytes"] > 1_000_000
