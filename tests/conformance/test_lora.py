"""PEFT is the truth: an adapter beside the weights gives the logits of PEFT's merged model."""

from __future__ import annotations

import json
import random
import warnings
from concurrent.futures import Future

import pytest
import torch
from safetensors.torch import load_file, save_file

from qwen3_asgi.errors import InvalidRequest
from qwen3_asgi.model.lora import read_adapter
from qwen3_asgi.scheduler.control import load_adapter
from qwen3_asgi.scheduler.loop import Scheduler
from qwen3_asgi.scheduler.plan import RequestId, Row
from qwen3_asgi.scheduler.request import Request
from tests.model.checkpoints import VOCAB, load, load_reference, write_checkpoint
from tests.scheduler.harness import Record

peft = pytest.importorskip("peft")

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
        torch.manual_seed(seed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PEFT's own use of what transformers has deprecated
            model = peft.get_peft_model(load_reference(folder), peft.LoraConfig(**settings))
        with torch.no_grad():
            for parameter, weight in model.named_parameters():
                if "lora_B" in parameter:  # zero at the start: an adapter that does nothing
                    weight.uniform_(-0.3, 0.3)
        path = tmp_path_factory.mktemp(name)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model.save_pretrained(path)
        made[name] = path, model.merge_and_unload().eval()
    return made


@pytest.fixture
def executor(folder, adapters):
    executor = load(folder)
    for name, (path, _) in adapters.items():
        adapter, _ = read_adapter(path, executor.model_config)
        executor.load_adapter(name, adapter)
    return executor


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
        adapter, fingerprint = read_adapter(adapters[name][0], executor.model_config)
        done: Future[None] = Future()
        scheduler.control(load_adapter(name, adapter, fingerprint, done))
    for turn in range(2):
        for name in names:
            scheduler.submit(Request(f"{name} {turn}", PROMPT, max_tokens=12, adapter=name))
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
        read_adapter(tmp_path, executor.model_config)
    assert caught.value.param == "lora_path"


def test_an_adapter_of_another_model_is_refused(executor, adapters, tmp_path) -> None:
    source = adapters["all"][0]
    (tmp_path / "adapter_config.json").write_bytes((source / "adapter_config.json").read_bytes())
    tensors = load_file(source / "adapter_model.safetensors")
    for wrong, message in [
        ({"base_model.model.model.layers.9.mlp.up_proj.lora_A.weight": torch.ones(4, 48)}, "3 lay"),
        ({"base_model.model.lm_head.lora_A.weight": torch.ones(4, 48)}, "adapts no module"),
        (
            {"base_model.model.model.layers.0.mlp.up_proj.lora_A.weight": torch.ones(4, 47)},
            r"needs \(4, 48\)",
        ),
    ]:
        save_file(tensors | wrong, tmp_path / "adapter_model.safetensors")
        with pytest.raises(InvalidRequest, match=message):
            read_adapter(tmp_path, executor.model_config)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(InvalidRequest, match="cannot be read"):
        read_adapter(tmp_path, executor.model_config)
    (tmp_path / "adapter_model.safetensors").unlink()
    with pytest.raises(InvalidRequest, match="is missing"):
        read_adapter(tmp_path, executor.model_config)
