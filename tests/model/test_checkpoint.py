from __future__ import annotations

import json
import pickle

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file

from qwen3_asgi.errors import ModelLoadError
from qwen3_asgi.model.checkpoint import Checkpoint, find_folder
from qwen3_asgi.model.config import load_model_config
from qwen3_asgi.model.cpu.library import kernel_library
from qwen3_asgi.model.linear import Linear
from qwen3_asgi.model.quantization import choose_linear
from qwen3_asgi.model.weights import load_weights
from tests.model.checkpoints import edit_config, load, write_checkpoint

Q_PROJ = "model.layers.1.self_attn.q_proj.weight"
CPU = torch.device("cpu")


@pytest.fixture
def tied(tmp_path):
    return write_checkpoint(tmp_path, "tied")


@pytest.fixture
def sharded(tmp_path):
    return write_checkpoint(tmp_path, "untied_sharded")


def rewrite(folder, edit):
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


def weights(folder, dtype=torch.float32, linear=Linear):
    return load_weights(Checkpoint(folder), load_model_config(folder), dtype, CPU, linear)


def test_parts_are_fused_in_order_and_each_weight_is_held_once(tied):
    stored = load_file(tied / "model.safetensors")
    loaded = weights(tied)
    layer, prefix = loaded.layers[1], "model.layers.1."
    assert layer.qkv.shape == ((4 + 2 + 2) * 16, 48)
    assert layer.gate_up.shape == (160, 48)
    assert layer.qk_norm.shape == (6, 16)
    identity = torch.eye(48)
    parts = [stored[f"{prefix}self_attn.{name}_proj.weight"] for name in "qkv"]
    torch.testing.assert_close(layer.qkv(identity).T, torch.cat(parts))
    parts = [stored[f"{prefix}mlp.{name}_proj.weight"] for name in ("gate", "up")]
    torch.testing.assert_close(layer.gate_up(identity).T, torch.cat(parts))
    assert torch.equal(layer.qk_norm[3], stored[prefix + "self_attn.q_norm.weight"])
    assert torch.equal(layer.qk_norm[4], stored[prefix + "self_attn.k_norm.weight"])
    assert loaded.lm_head._weight is loaded.embedding.weight


def test_a_tied_embedding_shares_the_panels_of_the_vocabulary_product(tied):
    if kernel_library()[0] is None:
        pytest.skip("no kernels on this machine")
    loaded = weights(tied, linear=choose_linear(None, CPU))
    assert loaded.embedding is loaded.lm_head
    stored = load_file(tied / "model.safetensors")["model.embed_tokens.weight"]
    ids = torch.tensor([319, 0, 65])
    assert torch.equal(loaded.embedding.rows(ids), stored[ids].float())


def test_weights_are_converted_and_packed_for_bf16(tied):
    loaded = weights(tied, torch.bfloat16)
    assert loaded.embedding.dtype == loaded.layers[0].input_norm.dtype == torch.bfloat16
    if loaded.lm_head.is_packed:
        assert loaded.lm_head._weight is None


def test_a_running_model_does_not_change_with_its_file(tied):
    loaded = weights(tied)
    before = loaded.embedding.weight.clone()
    path = tied / "model.safetensors"
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        file.write(b"\x00" * (path.stat().st_size // 2))
    assert torch.equal(loaded.embedding.weight, before)


def test_shards_are_read_through_the_index(sharded):
    assert len(list(sharded.glob("model-*.safetensors"))) > 2
    assert not (sharded / "model.safetensors").exists()
    assert load(sharded).model_config.tie_word_embeddings is False


def test_a_missing_shard_is_named(sharded):
    shard = sorted(sharded.glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ModelLoadError, match=shard.name):
        load(sharded)


@pytest.mark.parametrize("name", ["../model.safetensors", "weights.bin", "a/b.safetensors"])
def test_an_index_cannot_point_elsewhere(sharded, name):
    edit_config(
        sharded, lambda raw: raw["weight_map"].update(x=name), "model.safetensors.index.json"
    )
    with pytest.raises(ModelLoadError, match="not the name of a safetensors file"):
        load(sharded)


def test_an_index_without_a_map_is_refused(sharded):
    (sharded / "model.safetensors.index.json").write_text(json.dumps({}))
    with pytest.raises(ModelLoadError, match="weight_map"):
        load(sharded)


def test_a_missing_tensor_is_named_with_its_shape(tied):
    rewrite(tied, lambda tensors: tensors.pop(Q_PROJ))
    with pytest.raises(ModelLoadError) as caught:
        load(tied)
    assert str(tied) in str(caught.value)
    assert f"'{Q_PROJ}' of shape [64, 48] is missing" in str(caught.value)


def test_a_wrong_shape_is_named_with_both_shapes(tied):
    rewrite(tied, lambda tensors: tensors.update({Q_PROJ: torch.zeros(48, 64)}))
    with pytest.raises(ModelLoadError) as caught:
        load(tied)
    message = str(caught.value)
    assert f"{tied / 'model.safetensors'}: tensor '{Q_PROJ}'" in message
    assert "expected shape [64, 48], found [48, 64]" in message


def test_an_unexpected_tensor_is_named(tied):
    rewrite(tied, lambda tensors: tensors.update({"model.layers.9.extra": torch.zeros(3)}))
    with pytest.raises(ModelLoadError, match=r"model\.layers\.9\.extra.*unexpected.*\[3\]"):
        load(tied)


def test_what_tied_and_old_checkpoints_carry_along_is_ignored(tied):
    extra = {"lm_head.weight": torch.zeros(320, 48), "model.rotary_emb.inv_freq": torch.zeros(8)}
    rewrite(tied, lambda tensors: tensors.update(extra))
    assert load(tied).model_config.tie_word_embeddings


def test_a_type_that_cannot_be_computed_with_is_named(tied):
    rewrite(tied, lambda tensors: tensors.update({Q_PROJ: torch.zeros(64, 48, dtype=torch.int8)}))
    with pytest.raises(ModelLoadError, match=f"{Q_PROJ}.*I8"):
        load(tied)


def test_a_damaged_file_is_named(tied):
    (tied / "model.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(ModelLoadError, match=r"model\.safetensors is damaged"):
        load(tied)


def test_a_pickle_is_never_read(tied):
    (tied / "model.safetensors").unlink()
    (tied / "pytorch_model.bin").write_bytes(pickle.dumps(Trap()))
    with pytest.raises(ModelLoadError, match=r"pytorch_model\.bin is a pickle"):
        load(tied)


class Trap:
    def __reduce__(self):
        return (pytest.fail, ("the pickle was read",))


def test_a_local_folder_is_taken_as_it_is(tmp_path):
    assert find_folder(tmp_path) == tmp_path
    assert find_folder(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("name", ["/no/such", "./no/such", "nosuchfolder", "a/b/c"])
def test_a_path_that_is_not_there_is_not_asked_of_the_hub(name, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", pytest.fail)
    with pytest.raises(ModelLoadError, match="no such folder"):
        find_folder(name)


def test_a_file_is_not_a_folder(tmp_path):
    path = tmp_path / "model.safetensors"
    path.touch()
    with pytest.raises(ModelLoadError, match="is a file"):
        find_folder(path)


def test_a_hub_id_is_fetched_without_pickles_or_code(monkeypatch, tmp_path):
    asked = {}

    def fetch(name, *, allow_patterns):
        asked.update(name=name, patterns=allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    assert find_folder("Qwen/Qwen3-0.6B") == tmp_path
    assert asked["name"] == "Qwen/Qwen3-0.6B"
    assert not any(p.endswith((".py", ".bin", ".pt", "*")) for p in asked["patterns"])


def test_the_hubs_own_words_are_passed_on(monkeypatch):
    def fetch(name, *, allow_patterns):
        raise OSError("the hub is away")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    with pytest.raises(ModelLoadError, match="the hub is away"):
        find_folder("Qwen/Qwen3-0.6B")
