"""LoRA adapters on a running engine: names, limits, and who gets which."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread
import pytest

from qwen3_asgi.config import EngineConfig
from qwen3_asgi.errors import InvalidRequest
from tests.engine.adapters import PROMPT, expected_with, say, write_adapter
from tests.engine.engines import (
    Gate,
    executor,
    expected,
    running,
    settle,
    tokens,
    toy_engine,
)

if TYPE_CHECKING:
    from pathlib import Path


pytestmark = pytest.mark.anyio


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, Path]:
    return {name: write_adapter(tmp_path / name, name) for name in ("one", "two", "three")}


async def test_an_adapter_is_loaded_named_and_unloaded(folders: dict[str, Path]) -> None:
    async with running(toy_engine()) as engine:
        assert engine.adapters() == ()
        info = await engine.load_adapter("mine", folders["one"])  # starts the engine
        assert engine.adapters() == (info,)
        assert (info.name, info.path, info.rank) == ("mine", str(folders["one"]), 4)
        assert await say(engine, "mine") == expected_with(folders["one"], PROMPT, 12)
        assert await say(engine, None) == expected(PROMPT, 12)
        assert expected(PROMPT, 12) != expected_with(folders["one"], PROMPT, 12)
        await engine.unload_adapter("mine")
        assert engine.adapters() == ()
        for name in ("mine", "never"):
            with pytest.raises(InvalidRequest, match="no adapter") as refused:
                await say(engine, name)
            assert (refused.value.param, refused.value.code) == ("model", "model_not_found")
            with pytest.raises(InvalidRequest, match="no adapter") as refused:
                await engine.unload_adapter(name)
            assert (refused.value.param, refused.value.code) == ("lora_name", "model_not_found")
        await settle(engine)


async def test_the_same_from_a_thread(folders: dict[str, Path]) -> None:
    async with running(toy_engine()) as engine:

        def work() -> None:
            info = engine.load_adapter_sync("mine", folders["two"])
            assert engine.adapters() == (info,)
            output = engine.generate_sync(prompt_token_ids=PROMPT, params=tokens(5), adapter="mine")
            assert list(output.token_ids) == expected_with(folders["two"], PROMPT, 5)
            engine.unload_adapter_sync("mine")
            with pytest.raises(InvalidRequest, match="no adapter"):
                engine.unload_adapter_sync("mine")

        await anyio.to_thread.run_sync(work)
        for call in (
            lambda: engine.load_adapter_sync("mine", folders["two"]),
            lambda: engine.unload_adapter_sync("mine"),
        ):
            with pytest.raises(RuntimeError, match="block the event loop"):
                call()


@pytest.mark.parametrize("name", ["", " a", "a ", "a\nb", "x" * 129, "fake"])
async def test_a_name_that_can_not_be_is_refused(folders: dict[str, Path], name: str) -> None:
    async with running(toy_engine()) as engine:
        with pytest.raises(InvalidRequest) as refused:
            await engine.load_adapter(name, folders["one"])
        assert refused.value.param == "lora_name"
        assert engine.adapters() == ()
        await engine.load_adapter("a b/c: ü", folders["one"])


async def test_there_are_at_most_so_many(folders: dict[str, Path]) -> None:
    async with running(toy_engine(config=EngineConfig(max_adapters=2))) as engine:
        await engine.load_adapter("a", folders["one"])
        await engine.load_adapter("b", folders["two"])
        with pytest.raises(InvalidRequest) as refused:
            await engine.load_adapter("c", folders["three"])
        assert (refused.value.param, refused.value.code) == ("lora_name", "too_many_adapters")
        await engine.load_adapter("b", folders["three"])  # in place of one
        assert [info.name for info in engine.adapters()] == ["a", "b"]
        await engine.unload_adapter("a")
        await engine.load_adapter("c", folders["one"])


async def test_only_allowed_folders_are_read(folders: dict[str, Path], tmp_path: Path) -> None:
    async with running(toy_engine()) as engine:
        with pytest.raises(InvalidRequest, match="not inside") as refused:
            await engine.load_adapter("mine", folders["one"], within=[folders["two"]])
        assert refused.value.param == "lora_path"
        await engine.load_adapter("mine", "one", within=[tmp_path])
        assert await say(engine, "mine") == expected_with(folders["one"], PROMPT, 12)


async def test_adapters_and_the_base_share_a_batch_and_no_cache(folders: dict[str, Path]) -> None:
    fake = executor()
    gate = Gate(fake)
    async with running(toy_engine(fake), gate) as engine:
        gate.open()
        for adapter in ("one", "two"):
            await engine.load_adapter(adapter, folders[adapter])
        names = [None, "one", "two"]
        for turn in range(2):
            for name in names:
                output = await engine.generate(
                    prompt_token_ids=PROMPT, params=tokens(1), adapter=name
                )
                assert output.cached_tokens == (32 if turn else 0), name
        gate.hold()
        handles = {
            name: await engine.submit(prompt_token_ids=PROMPT, params=tokens(20), adapter=name)
            for name in names
        }
        gate.open()
        said = {
            name: [token.token_id async for batch in handle for token in batch.tokens]
            for name, handle in handles.items()
        }
        assert max(Counter(row.step for row in fake.rows).values()) == 3, "never all in one batch"
        assert said == {
            None: expected(PROMPT, 20),
            "one": expected_with(folders["one"], PROMPT, 20),
            "two": expected_with(folders["two"], PROMPT, 20),
        }
        # Other weights under the same name are another adapter.
        await engine.load_adapter("one", folders["three"])
        output = await engine.generate(prompt_token_ids=PROMPT, params=tokens(1), adapter="one")
        assert output.cached_tokens == 0
        await settle(engine)
