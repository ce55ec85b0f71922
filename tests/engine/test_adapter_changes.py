"""What happens to everybody while adapters are replaced and unloaded: nothing is lost."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio
import pytest
from prometheus_client import CollectorRegistry

from qwen3_asgi.config import EngineConfig
from qwen3_asgi.errors import EngineNotReady, InvalidRequest, ModelLoadError
from tests.engine.adapters import PROMPT, expected_with, say, write_adapter
from tests.engine.engines import (
    GUARD_SECONDS,
    LONG,
    Gate,
    executor,
    expected,
    quiet,
    running,
    settle,
    tokens,
    toy_engine,
    until,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from qwen3_asgi.engine.engine import Engine

pytestmark = pytest.mark.anyio


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, Path]:
    return {name: write_adapter(tmp_path / name, name) for name in ("one", "two", "three")}


def handed_over(engine: Engine) -> int:
    """Commands that the scheduler got so far."""
    return engine._running().adapters._commands


async def test_a_replacement_waits_for_its_users_and_later_ones_for_it(
    folders: dict[str, Path],
) -> None:
    fake = executor()
    gate = Gate(fake)
    async with running(toy_engine(fake), gate) as engine, anyio.create_task_group() as group:
        await engine.load_adapter("mine", folders["one"])
        user = await engine.submit(prompt_token_ids=PROMPT, params=tokens(30), adapter="mine")
        await gate.held()
        replaced = anyio.Event()

        async def replace() -> None:
            await engine.load_adapter("mine", folders["two"])
            replaced.set()

        group.start_soon(replace)
        gate.allow(1)
        await gate.held(2)
        await until(lambda: handed_over(engine) == 2)
        later = await engine.submit(prompt_token_ids=PROMPT, params=tokens(30), adapter="mine")
        base = await engine.submit(prompt_token_ids=PROMPT, params=tokens(5))
        gate.allow(1)
        await gate.held(3)
        assert engine.load().num_held == 1
        assert [info.path for info in engine.adapters()] == [str(folders["one"])]
        gate.allow(6)  # others go on meanwhile
        said = [token.token_id async for batch in base for token in batch.tokens]
        assert said == expected(PROMPT, 5)
        assert not replaced.is_set()
        gate.open()
        for handle, name in ((user, "one"), (later, "two")):
            said = [token.token_id async for batch in handle for token in batch.tokens]
            assert said == expected_with(folders[name], PROMPT, 30), name
        with anyio.fail_after(GUARD_SECONDS):
            await replaced.wait()
        assert [info.path for info in engine.adapters()] == [str(folders["two"])]
        await settle(engine)


async def test_who_waits_for_a_replacement_can_be_cancelled(folders: dict[str, Path]) -> None:
    fake = executor()
    gate = Gate(fake)
    registry = CollectorRegistry()
    engine = toy_engine(fake)
    engine.metrics(registry)
    async with running(engine, gate), anyio.create_task_group() as group:
        await engine.load_adapter("mine", folders["one"])
        user = await engine.submit(prompt_token_ids=PROMPT, params=LONG, adapter="mine")
        await gate.held()
        group.start_soon(engine.load_adapter, "mine", folders["two"])
        await until(lambda: handed_over(engine) == 2)
        waiting = await engine.submit(prompt_token_ids=PROMPT, params=LONG, adapter="mine")
        gate.allow(1)
        await gate.held(2)
        load = engine.load()
        assert (load.num_running, load.num_waiting, load.num_held) == (1, 1, 1)
        waiting.cancel()
        gate.allow(1)
        await gate.held(3)
        load = engine.load()
        assert (load.num_running, load.num_waiting, load.num_held) == (1, 0, 0)
        labels = {
            "model_name": "fake",
            "engine": engine._metrics._instruments.engine_labels[1],
            "state": "post_control_deferred",
        }
        assert registry.get_sample_value("qwen3_asgi_requests_cancelled_total", labels) == 1
        assert not fake.rows_of(waiting.request_id)
        user.cancel()
        gate.open()
        await settle(engine)


async def test_an_unloaded_adapter_takes_nobody_new_and_serves_its_users(
    folders: dict[str, Path],
) -> None:
    fake = executor()
    gate = Gate(fake)
    async with running(toy_engine(fake), gate) as engine, anyio.create_task_group() as group:
        await engine.load_adapter("mine", folders["one"])
        user = await engine.submit(prompt_token_ids=PROMPT, params=tokens(9), adapter="mine")
        await gate.held()
        unloaded = anyio.Event()

        async def unload() -> None:
            await engine.unload_adapter("mine")
            unloaded.set()

        group.start_soon(unload)
        await until(lambda: engine.adapters() == ())
        with pytest.raises(InvalidRequest, match="no adapter 'mine'"):
            await say(engine, "mine")
        gate.allow(3)
        await gate.held(4)
        await quiet()
        assert not unloaded.is_set()
        assert "mine" in fake.adapters
        gate.open()
        said = [token.token_id async for batch in user for token in batch.tokens]
        assert said == expected_with(folders["one"], PROMPT, 9)
        with anyio.fail_after(GUARD_SECONDS):
            await unloaded.wait()
        assert fake.adapters == {}


async def test_commands_of_one_name_are_carried_out_in_order(folders: dict[str, Path]) -> None:
    """Replaced, unloaded and loaded again while somebody uses the first."""
    fake = executor()
    gate = Gate(fake)
    async with running(toy_engine(fake), gate) as engine:
        await engine.load_adapter("mine", folders["one"])
        user = await engine.submit(prompt_token_ids=PROMPT, params=tokens(3), adapter="mine")
        await gate.held()
        async with anyio.create_task_group() as group:
            group.start_soon(engine.load_adapter, "mine", folders["two"])
            await until(lambda: handed_over(engine) == 2)
            group.start_soon(engine.unload_adapter, "mine")
            await until(lambda: handed_over(engine) == 3)
            assert engine.adapters() == ()
            group.start_soon(engine.load_adapter, "mine", folders["three"])
            await until(lambda: handed_over(engine) == 4)
            gate.open()
        assert [info.path for info in engine.adapters()] == [str(folders["three"])]
        assert await say(engine, "mine") == expected_with(folders["three"], PROMPT, 12)
        said = [token.token_id async for batch in user for token in batch.tokens]
        assert said == expected_with(folders["one"], PROMPT, 3)


async def test_a_replacement_that_is_to_be_unloaded_serves_only_who_waited_for_it(
    folders: dict[str, Path],
) -> None:
    fake = executor()
    gate = Gate(fake)
    async with running(toy_engine(fake), gate) as engine, anyio.create_task_group() as group:
        await engine.load_adapter("mine", folders["one"])
        user = await engine.submit(prompt_token_ids=PROMPT, params=tokens(3), adapter="mine")
        await gate.held()
        group.start_soon(engine.load_adapter, "mine", folders["two"])
        await until(lambda: handed_over(engine) == 2)
        later = await engine.submit(prompt_token_ids=PROMPT, params=tokens(3), adapter="mine")
        group.start_soon(engine.unload_adapter, "mine")
        await until(lambda: handed_over(engine) == 3)
        while not fake.rows_of(later.request_id):
            step = gate.arrived
            gate.allow(1)
            await gate.held(step + 1)
        assert engine.adapters() == ()
        with pytest.raises(InvalidRequest, match="no adapter 'mine'"):
            await say(engine, "mine")
        gate.open()
        for handle, name in ((user, "one"), (later, "two")):
            said = [token.token_id async for batch in handle for token in batch.tokens]
            assert said == expected_with(folders[name], PROMPT, 3), name
    assert fake.adapters == {}


async def test_who_gives_up_waiting_takes_nothing_back(folders: dict[str, Path]) -> None:
    fake = executor()
    gate = Gate(fake)
    async with running(toy_engine(fake), gate) as engine:
        await engine.load_adapter("mine", folders["one"])
        user = await engine.submit(prompt_token_ids=PROMPT, params=LONG, adapter="mine")
        await gate.held()
        async with anyio.create_task_group() as group:
            group.start_soon(engine.load_adapter, "mine", folders["two"])
            await until(lambda: handed_over(engine) == 2)
            group.cancel_scope.cancel()
        user.cancel()
        gate.open()
        assert await say(engine, "mine") == expected_with(folders["two"], PROMPT, 12)
        assert [info.path for info in engine.adapters()] == [str(folders["two"])]


async def test_a_stop_answers_who_waits_and_forgets_adapters(folders: dict[str, Path]) -> None:
    fake = executor()
    gate = Gate(fake)
    engine = toy_engine(fake)
    async with running(engine, gate):
        await engine.load_adapter("mine", folders["one"])
        await engine.submit(prompt_token_ids=PROMPT, params=LONG, adapter="mine")
        user = await engine.submit(prompt_token_ids=PROMPT, params=LONG, adapter="mine")
        await gate.held()
        answers: list[Exception] = []

        async def change(command: Callable[[], object]) -> None:
            try:
                await command()  # type: ignore[misc]
            except EngineNotReady as error:
                answers.append(error)

        async with anyio.create_task_group() as group:
            group.start_soon(change, lambda: engine.load_adapter("mine", folders["two"]))
            await until(lambda: handed_over(engine) == 2)
            group.start_soon(change, lambda: engine.unload_adapter("mine"))
            await until(lambda: handed_over(engine) == 3)
            gate.open()
            await engine.stop(drain=0)
        assert len(answers) == 2
        user.cancel()
        assert engine.adapters() == ()
        with pytest.raises(EngineNotReady):
            await engine.unload_adapter("mine")
        await engine.start()
        assert engine.adapters() == ()
        with pytest.raises(InvalidRequest, match="no adapter"):
            await say(engine, "mine")


async def test_no_memory_for_an_adapter_leaves_the_one_before(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = executor()
    async with running(toy_engine(fake)) as engine:
        await engine.load_adapter("mine", folders["one"])
        with monkeypatch.context() as patch:

            def no_memory(name: str, adapter: object) -> None:
                raise RuntimeError("out of memory")

            patch.setattr(fake, "load_adapter", no_memory)
            for name in ("mine", "other"):
                with pytest.raises(ModelLoadError, match="RuntimeError: out of memory"):
                    await engine.load_adapter(name, folders["two"])
        assert [info.path for info in engine.adapters()] == [str(folders["one"])]
        assert await say(engine, "mine") == expected_with(folders["one"], PROMPT, 12)
        await engine.load_adapter("other", folders["two"])
        assert await say(engine, "other") == expected_with(folders["two"], PROMPT, 12)


@pytest.mark.parametrize("overlap", [False, True])
async def test_nothing_is_lost_while_adapters_come_and_go_under_traffic(
    folders: dict[str, Path], *, overlap: bool
) -> None:
    """Clients of the base, of a steady adapter, of one that is replaced again and again, and of one
    that comes and goes. Each answer is what the model says undisturbed, before or after a change,
    or a refusal while there is nobody of that name."""
    count = 25
    truths = {
        None: [expected(PROMPT, count)],
        "steady": [expected_with(folders["one"], PROMPT, count)],
        "replaced": [expected_with(folders[name], PROMPT, count) for name in ("two", "three")],
        "flaky": [expected_with(folders["one"], PROMPT, count)],
    }
    answered: dict[str | None, list[list[int]]] = {name: [] for name in truths}
    refused = 0
    config = EngineConfig(max_batch=6, max_prefill_tokens=64, overlap=overlap)
    async with running(toy_engine(executor(num_kv_blocks=40), config)) as engine:
        await engine.load_adapter("steady", folders["one"])
        await engine.load_adapter("replaced", folders["two"])
        churning = True

        async def client(name: str | None) -> None:
            nonlocal refused
            while churning or not answered[name]:
                try:
                    answered[name].append(await say(engine, name, count))
                except InvalidRequest as error:
                    if (name, error.code) != ("flaky", "model_not_found"):
                        raise
                    refused += 1
                    await anyio.lowlevel.checkpoint()

        async with anyio.create_task_group() as group:
            for name in truths:
                for _ in range(3):
                    group.start_soon(client, name)
            for turn in range(10):
                await engine.load_adapter("flaky", folders["one"])
                await engine.load_adapter("replaced", folders["three" if turn % 2 else "two"])
                seen = len(answered["flaky"])
                await until(lambda seen=seen: len(answered["flaky"]) > seen)  # type: ignore[misc]
                await engine.unload_adapter("flaky")
            await engine.load_adapter("flaky", folders["one"])
            churning = False
        await settle(engine)
    for name, outputs in answered.items():
        assert all(output in truths[name] for output in outputs), name
    assert {tuple(output) for output in answered["replaced"]} == set(map(tuple, truths["replaced"]))
    assert refused, "nobody ever met the gap"
