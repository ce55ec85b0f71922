"""PEFT is the truth: an adapter beside the weights gives the logits of PEFT's merged model."""

from __future__ import annotations

import json
import random
from concurrent.futures import Future

import pytest
import torch
from safetensors.torch import load_file, save_file

from qwen3_asgi.engine.adapter_files import AdapterFolder
from qwen3_asgi.errors import InvalidRequest
from qwen3_asgi.model.lora import read_adapter
from qwen3_asgi.scheduler.control import load_adapter
from qwen3_asgi.scheduler.loop import Scheduler
from qwen3_asgi.scheduler.plan import RequestId, Row
from qwen3_asgi.scheduler.request import Request
from tests.conformance.lora_files import make_adapter
from tests.model.checkpoints import VOCAB, load, load_reference, write_checkpoint
from tests.model.driver import GREEDY
from tests.scheduler.harness import Record

pytest.importorskip("peft")

EVERYTHING = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ADAPTERS = {
    "all": {"r": 4, "lora_alpha": 16, "target_modules": EVERYTHING},
    "stabilised": {
        "r": 8,
        "lora_alpha": 16,
        "target_modules": ["q_proj", "v_proj"],
        "use_rslora": True,
    },
    "patterns": {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["k_proj", "down_proj"],
        "rank_pattern": {r"layers\.1\.self_attn\.k_proj": 2, "down_proj": 3},
        "alpha_pattern": {"k_proj": 32},
        "layers_to_transform": [0, 1],
    },
}
PROMPT = random.Random(3).choices(range(VOCAB), k=19)


@pytest.fixture(scope="module", params=["tied", "yarn"])
def folder(request, tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def adapters(folder, tmp_path_factory):
    """Folder of each adapter and the logits of the merged model, for `PROMPT` and for greedy."""
    made = {}
    for seed, (name, settings) in enumerate(ADAPTERS.items()):
        path = tmp_path_factory.mktemp(name)
        made[name] = path, make_adapter(folder, settings, path, seed=seed)
    return made


@pytest.fixture
def executor(folder, adapters):
    executor = load(folder)
    for name, (path, _) in adapters.items():
        adapter, _ = read(path, executor.model_config)
        executor.load_adapter(name, adapter)
    return executor


def read(path, config):
    return read_adapter(AdapterFolder(path).read, config)


def row(name: str | None, number: int = 0) -> Row:
    blocks = list(range(number * 8, number * 8 + 8))
    return Row(RequestId(f"{number}"), "prefill", PROMPT, 0, blocks, None, name)


def merged_logits(model, tokens):
    with torch.inference_mode():
        return model(torch.tensor([tokens])).logits[0]


@pytest.mark.parametrize("name", ADAPTERS)
def test_logits_are_those_of_the_merged_model(executor, folder, adapters, name) -> None:
    truth = merged_logits(adapters[name][1], PROMPT)
    base = merged_logits(load_reference(folder), PROMPT)
    assert (truth - base).abs().max() > 0.1, "the adapter must do something"
    torch.testing.assert_close(executor.forward_logits([row(name)]), truth, atol=1e-4, rtol=1e-4)


def test_adapters_and_the_base_in_one_batch_are_as_if_alone(executor, folder, adapters) -> None:
    names = [None, "all", "stabilised", None, "patterns", "all"]
    rows = [row(name, number) for number, name in enumerate(names)]
    together = executor.forward_logits(rows).split(len(PROMPT))
    for name, logits in zip(names, together, strict=True):
        model = load_reference(folder) if name is None else adapters[name][1]
        torch.testing.assert_close(logits, merged_logits(model, PROMPT), atol=1e-4, rtol=1e-4)


def test_greedy_through_the_scheduler_with_prefixes_and_preemption(folder, adapters) -> None:
    """Two adapters and the base share every prompt; the pool is too small for them all."""
    executor = load(folder, num_kv_blocks=22)
    record = Record()
    scheduler = Scheduler(executor, record, max_prefill_tokens=7, observer=record)
    names = [None, "all", "patterns"]
    for name in names[1:]:
        adapter, fingerprint = read(adapters[name][0], executor.model_config)
        done: Future[None] = Future()
        scheduler.control(load_adapter(name, adapter, fingerprint, done))
    for turn in range(2):
        for name in names:
            request = Request(
                f"{name} {turn}", PROMPT, sampling=GREEDY, max_tokens=12, adapter=name
            )
            scheduler.submit(request)
    for _ in range(300):
        scheduler.iterate()
        if scheduler.load.idle:
            break
    assert record.preempted
    for name in names:
        model = load_reference(folder) if name is None else adapters[name][1]
        tokens = list(PROMPT)
        for _ in range(12):
            tokens.append(int(merged_logits(model, tokens)[-1].argmax()))
        for turn in range(2):
            said = [
                e.token.token_id
                for e in record.events
                if e.request_id == f"{name} {turn}" and e.token
            ]
            assert said == tokens[len(PROMPT) :], name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"peft_type": "IA3"}, "does not describe a LoRA adapter"),
        ({"use_dora": True}, "use_dora is not supported"),
        ({"bias": "all"}, "biases"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"r": 5}, "this model with rank 5 needs"),
        ({"r": 100000}, "the rank must be 1 to 256"),
        ({"lora_alpha": "much"}, "lora_alpha must be a number"),
        ({"lora_alpha": float("nan")}, "lora_alpha must be a number"),
        ({"lora_alpha": 10**400}, "lora_alpha must be a number"),
        ({"rank_pattern": {"(": 4}}, "is no pattern"),
        # Each could hold the whole process for hours.
        ({"rank_pattern": {r"((\w|\.)+)+!": 4}}, "too complicated"),
        ({"alpha_pattern": {r"(?:\w|\w\w)*!": 4}}, "too complicated"),
        ({"alpha_pattern": {r".*" * 30 + "!": 4}}, "too complicated"),
        ({"alpha_pattern": [4]}, "must be an object"),
    ],
)
def test_a_wrong_adapter_says_what_is_wrong(executor, adapters, tmp_path, change, message) -> None:
    source = adapters["all"][0]
    settings = json.loads((source / "adapter_config.json").read_text()) | change
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    (tmp_path / "adapter_model.safetensors").write_bytes(
        (source / "adapter_model.safetensors").read_bytes()
    )
    with pytest.raises(InvalidRequest, match=message) as caught:
        read(tmp_path, executor.model_config)
    assert caught.value.param == "lora_path"


def test_an_adapter_of_another_model_is_refused(executor, adapters, tmp_path) -> None:
    source = adapters["all"][0]
    (tmp_path / "adapter_config.json").write_bytes((source / "adapter_config.json").read_bytes())
    tensors = load_file(source / "adapter_model.safetensors")
    for wrong, message in [
        ({"base_model.model.model.layers.9.mlp.up_proj.lora_A.weight": torch.ones(4, 48)}, "3 lay"),
        ({"base_model.model.lm_head.lora_A.weight": torch.ones(4, 48)}, "adapts no module"),
        (
            {
                f"base_model.model.model.layers.{'9' * 5000}.mlp.up_proj.lora_A.weight": (
                    torch.ones(4, 48)
                )
            },
            "adapts no module",
        ),
        (
            {
                "base_model.model.model.layers.0.mlp.up_proj.lora_A.weight": (
                    torch.ones(4, 48, dtype=torch.int32)
                )
            },
            "has the type torch.int32",
        ),
        (
            {"base_model.model.model.layers.0.mlp.up_proj.lora_A.weight": torch.ones(4, 47)},
            r"needs \(4, 48\)",
        ),
    ]:
        save_file(tensors | wrong, tmp_path / "adapter_model.safetensors")
        with pytest.raises(InvalidRequest, match=message) as caught:
            read(tmp_path, executor.model_config)
        assert len(caught.value.message) <= 500
    (tmp_path / "adapter_model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(InvalidRequest, match="cannot be read"):
        read(tmp_path, executor.model_config)
    (tmp_path / "adapter_model.safetensors").unlink()
    with pytest.raises(InvalidRequest, match="is missing"):
        read(tmp_path, executor.model_config)


def test_the_fingerprint_is_that_of_the_files(executor, adapters, tmp_path) -> None:
    """It decides who shares a prefix cache: a changed scale is another adapter, a copy is not."""
    source = adapters["all"][0]
    prints = set()
    for turn, alpha in enumerate([16, 16, 17]):
        folder = tmp_path / str(turn)
        folder.mkdir()
        settings = json.loads((source / "adapter_config.json").read_text()) | {"lora_alpha": alpha}
        (folder / "adapter_config.json").write_text(json.dumps(settings))
        weights = (source / "adapter_model.safetensors").read_bytes()
        (folder / "adapter_model.safetensors").write_bytes(weights)
        prints.add(read(folder, executor.model_config)[1])
    assert len(prints) == 2
    changed = bytearray(weights)
    changed[-1] ^= 1
    (folder / "adapter_model.safetensors").write_bytes(changed)
    assert read(folder, executor.model_config)[1] not in prints


def test_files_are_no_larger_than_an_adapter_can_be(executor, tmp_path) -> None:
    asked = []

    def reader(name: str, max_bytes: int) -> bytes:
        asked.append((name, max_bytes))
        return b'{"peft_type": "LORA", "r": 4, "lora_alpha": 8}'

    with pytest.raises(InvalidRequest, match="cannot be read"):
        read_adapter(reader, executor.model_config)
    (_, settings), (_, weights) = asked
    full = 256 * 3 * ((48 + 64) + 2 * (48 + 32) + (64 + 48) + 3 * (48 + 80))
    assert settings <= 1 << 20
    assert 4 * full <= weights <= 4 * full + (1 << 20)
