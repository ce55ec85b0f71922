"""Adapters through a whole engine with the bundled model: batches, traffic, and HTTP's refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import anyio
import httpx
import pytest
from prometheus_client import CollectorRegistry
from safetensors.torch import load_file, save_file

from qwen3_asgi.app import create_app
from qwen3_asgi.config import EngineConfig, SamplingParams
from qwen3_asgi.engine.engine import Engine
from qwen3_asgi.errors import InvalidRequest
from qwen3_asgi.testing import assert_idle_async
from qwen3_asgi.tiny import tiny_path
from tests.conformance.lora_files import make_adapter
from tests.model.checkpoints import greedy

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import torch

pytest.importorskip("peft")
pytestmark = [pytest.mark.anyio, pytest.mark.parametrize("anyio_backend", ["asyncio"])]

SETTINGS: dict[str, dict[str, Any]] = {
    "wide": {
        "r": 4,
        "lora_alpha": 16,
        "target_modules": "all-linear",
    },
    "stabilised": {
        "r": 8,
        "lora_alpha": 8,
        "target_modules": ["q_proj", "v_proj", "down_proj"],
        "use_rslora": True,
    },
}
PROMPTS = ["What is the capital of France?", "Count from 1 to 20.", "What is the capital of Fra"]
COUNT = 16
# Small blocks, so that every prompt has full ones for the prefix cache.
CONFIG = EngineConfig(
    device="cpu", dtype="float32", block_size=2, num_kv_blocks=768, max_prefill_tokens=40
)
# A real answer of the model itself, or of one of the adapters: tokens, and the chosen's logprobs.
Said = tuple[tuple[int, ...], tuple[float, ...]]


class Made(NamedTuple):
    folder: Path
    merged: Any


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Made]:
    checkpoint = Path(tiny_path())
    made = {}
    for seed, (name, settings) in enumerate(SETTINGS.items()):
        folder = tmp_path_factory.mktemp("adapters") / name
        made[name] = Made(folder, make_adapter(checkpoint, settings, folder, seed=seed, size=0.05))
    return made


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    engine = Engine("tiny", CONFIG)
    async with engine:
        yield engine
        await assert_idle_async(engine)


async def say(engine: Engine, adapter: str | None, prompt: str, **options: Any) -> Said:
    params = SamplingParams(max_tokens=COUNT, temperature=0, ignore_eos=True, logprobs=0)
    output = await engine.generate(prompt=prompt, params=params, adapter=adapter, **options)
    assert output.logprobs is not None
    return output.token_ids, tuple(token.logprob or 0.0 for token in output.logprobs)


async def alone(engine: Engine, adapter: str | None) -> list[Said]:
    """One after the other, and nothing of it in the prefix cache."""
    return [
        await say(engine, adapter, prompt, cache_salt=f"{adapter} {number}")
        for number, prompt in enumerate(PROMPTS)
    ]


def same(said: Said, truth: Said) -> bool:
    return said[0] == truth[0] and bool(said[1] == pytest.approx(truth[1], abs=1e-4))


async def test_adapters_and_the_base_in_one_batch_are_three_runs(
    engine: Engine, made: dict[str, Made]
) -> None:
    for adapter, (folder, _) in made.items():
        info = await engine.load_adapter(adapter, folder)
        assert info.rank == SETTINGS[adapter]["r"]
    names: list[str | None] = [None, *made]
    truths = {name: await alone(engine, name) for name in names}
    for number, prompt in enumerate(PROMPTS):
        ids = engine.tokenizer.encode(prompt)
        for adapter, (_, merged) in made.items():
            assert list(truths[adapter][number][0]) == greedy(merged, ids, COUNT), (adapter, prompt)
    assert len({truths[name][0][0] for name in names}) == len(names), "they must differ"
    together: dict[tuple[str | None, int, int], Said] = {}

    async def one(name: str | None, number: int, turn: int) -> None:
        together[name, number, turn] = await say(engine, name, PROMPTS[number])

    registry = CollectorRegistry()
    engine.metrics(registry)
    before = engine.load().step
    for turn in range(2):  # the second finds the prefixes in the cache
        async with anyio.create_task_group() as group:
            for number in range(len(PROMPTS)):
                for name in names:
                    group.start_soon(one, name, number, turn)
    hits = "vllm:prefix_cache_hits_total"
    found = [
        sample.value for m in registry.collect() for sample in m.samples if sample.name == hits
    ]
    assert sum(found) > 0, "the cache was never used"
    assert engine.load().step - before < len(together) * COUNT / 2, "never batched"
    assert len(together) == 2 * len(PROMPTS) * len(names)
    for (name, number, turn), said in together.items():
        assert same(said, truths[name][number]), (name, number, turn)


async def test_loading_under_traffic_loses_nothing(engine: Engine, made: dict[str, Made]) -> None:
    wide, stabilised = made["wide"].folder, made["stabilised"].folder
    await engine.load_adapter("steady", wide)
    await engine.load_adapter("other", stabilised)
    truths: dict[str | None, list[list[Said]]] = {
        None: [await alone(engine, None)],
        "steady": [await alone(engine, "steady")],
    }
    truths["flaky"] = [await alone(engine, "other")]
    truths["replaced"] = [truths["steady"][0], truths["flaky"][0]]
    await engine.unload_adapter("other")
    await engine.load_adapter("replaced", wide)
    answered: list[tuple[str | None, int, Said]] = []
    refused = 0
    changing = True

    async def client(name: str | None, number: int) -> None:
        nonlocal refused
        while changing:
            try:
                answered.append((name, number, await say(engine, name, PROMPTS[number])))
            except InvalidRequest as error:
                if (name, error.code) != ("flaky", "model_not_found"):
                    raise
                refused += 1
                await anyio.lowlevel.checkpoint()

    async with anyio.create_task_group() as group:
        for number in range(len(PROMPTS)):
            for name in truths:
                group.start_soon(client, name, number)
        for turn in range(4):
            await engine.load_adapter("replaced", wide if turn % 2 else stabilised)
            await engine.load_adapter("flaky", stabilised)
            seen = len(answered)
            while not any(name == "flaky" for name, _, _ in answered[seen:]):
                await anyio.lowlevel.checkpoint()
            await engine.unload_adapter("flaky")
        changing = False
    assert refused, "nobody ever met the gap"
    for name, number, said in answered:
        assert any(same(said, truth[number]) for truth in truths[name]), (name, number)
    replaced = [said for name, number, said in answered if (name, number) == ("replaced", 0)]
    for truth in truths["replaced"]:
        assert any(same(said, truth[0]) for said in replaced), "one version never spoke"


def _tensor(tensors: dict[str, torch.Tensor], ending: str) -> str:
    return next(name for name in tensors if name.endswith(ending))


def spoil(folder: Path, what: str) -> None:
    """Make an adapter's copy wrong in one way."""
    config, weights = folder / "adapter_config.json", folder / "adapter_model.safetensors"
    tensors = load_file(weights)
    match what:
        case "the rank":
            config.write_text(json.dumps(json.loads(config.read_text()) | {"r": 6}))
        case "a target module":
            name = _tensor(tensors, "q_proj.lora_A.weight")
            save_file(tensors | {name.replace("q_proj", "x_proj"): tensors[name].clone()}, weights)
        case "the base's shape":
            name = _tensor(tensors, "q_proj.lora_A.weight")
            save_file(tensors | {name: tensors[name][:, :-1].contiguous()}, weights)
        case "more layers than the base":
            name = _tensor(tensors, "layers.0.self_attn.q_proj.lora_A.weight")
            save_file(
                tensors | {name.replace("layers.0", "layers.77"): tensors[name].clone()}, weights
            )
        case "half a pair":
            del tensors[_tensor(tensors, "q_proj.lora_B.weight")]
            save_file(tensors, weights)
        case "the kind":
            config.write_text(json.dumps(json.loads(config.read_text()) | {"peft_type": "IA3"}))
        case "a file cut short":
            weights.write_bytes(weights.read_bytes()[:-5])
        case "no weights":
            weights.unlink()
        case "only a pickle":
            weights.rename(folder / "adapter_model.bin")
        case "no config":
            config.unlink()
        case "weights that are a link out":
            weights.rename(folder.parent.parent / "weights")
            weights.symlink_to(folder.parent.parent / "weights")
        case _:
            raise AssertionError(what)


async def test_what_is_no_adapter_for_this_model_is_a_clear_refusal(
    engine: Engine, made: dict[str, Made], tmp_path: Path
) -> None:
    allowed = tmp_path / "allowed"
    app = create_app(engine, metrics=False, lora_folders=[allowed])
    wrongs = {
        "the rank": "rank 6 needs",
        "a target module": "adapts no module",
        "the base's shape": "needs (4, ",
        "more layers than the base": "the model has 5 layers",
        "half a pair": "lora_A and lora_B must both",
        "the kind": "does not describe a LoRA adapter",
        "a file cut short": "cannot be read",
        "no weights": "adapter_model.safetensors is missing",
        "only a pickle": "adapter_model.safetensors is missing",
        "no config": "adapter_config.json is missing",
        "weights that are a link out": "not inside of a folder",
    }
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        for number, (wrong, message) in enumerate(wrongs.items()):
            folder = allowed / str(number)
            folder.mkdir(parents=True)
            for source in made["wide"].folder.glob("adapter_*"):
                (folder / source.name).write_bytes(source.read_bytes())
            asked = {"lora_name": "mine", "lora_path": str(number)}
            response = await http.post("/v1/load_lora_adapter", json=asked)
            assert response.status_code == 200, "it is good before it is spoilt"
            asked["lora_name"] = "spoilt"
            spoil(folder, wrong)
            response = await http.post("/v1/load_lora_adapter", json=asked)
            assert response.status_code == 400, wrong
            error = response.json()["error"]
            assert (error["type"], error["param"], error["code"]) == (
                "invalid_request_error",
                "lora_path",
                "invalid_adapter",
            )
            assert message in error["message"], wrong
            assert str(tmp_path) not in error["message"]
    assert [info.name for info in engine.adapters()] == ["mine"]
