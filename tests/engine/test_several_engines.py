"""Several engines in one process, and the one that all parts of a process share."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from prometheus_client import CollectorRegistry

from qwen3_asgi.config import EngineConfig
from qwen3_asgi.engine.engine import Engine
from tests.engine.engines import GUARD_SECONDS, Gate, executor, running, tokens, toy_engine
from tests.engine.loader import Loader

pytestmark = pytest.mark.anyio


async def test_two_engines_are_independent() -> None:
    async with running(toy_engine()) as one, running(toy_engine()) as other:
        for engine in (one, other):
            await engine.generate(prompt="hello", params=tokens(2))
        await one.stop()
        assert (one.state, other.state) == ("stopped", "ready")
        await other.generate(prompt="hello", params=tokens(2))


async def test_two_engines_have_gauges_of_their_own_in_one_registry() -> None:
    registry = CollectorRegistry()
    fakes = [executor(), executor()]
    gates = [Gate(fake) for fake in fakes]
    one, other = (toy_engine(fake) for fake in fakes)
    for engine in (one, other):
        engine.metrics(registry)
    async with running(one, gates[0]), running(other, gates[1]):
        handle = await one.submit(prompt="hello", params=tokens(2))
        await gates[0].held(1)
        running_now = {
            sample.labels["engine"]: sample.value
            for family in registry.collect()
            for sample in family.samples
            if sample.name == "vllm:num_requests_running"
        }
        assert sorted(running_now.values()) == [0, 1]
        assert len(running_now) == 2
        assert (one.load().num_running, other.load().num_running) == (1, 0)
        gates[0].open()
        assert sum([len(batch.tokens) async for batch in handle]) == 2


def test_the_shared_engine_is_loaded_once_by_many_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    loader, num_threads = Loader(), 32
    monkeypatch.setattr("qwen3_asgi.engine.engine.load_model", loader)
    barrier = threading.Barrier(num_threads)

    def use(_: int) -> tuple[int, tuple[int, ...]]:
        barrier.wait(GUARD_SECONDS)
        engine = Engine.shared("toy-shared-by-32")
        output = engine.generate_sync(prompt="hello", params=tokens(2))
        return id(engine), output.token_ids

    try:
        with ThreadPoolExecutor(num_threads) as pool:
            assert len(set(pool.map(use, range(num_threads)))) == 1
        assert loader.calls == 1
    finally:
        shared = Engine.shared("toy-shared-by-32")
        shared.stop_sync()
        shared.renew()  # for a test that uses it once more


def test_the_shared_engine_is_one_object_from_all_threads() -> None:
    barrier = threading.Barrier(16)

    def get(_: int) -> Engine:
        barrier.wait(GUARD_SECONDS)
        return Engine.shared("toy-shared", EngineConfig(max_batch=3))

    with ThreadPoolExecutor(16) as pool:
        engines = list(pool.map(get, range(16)))
    assert len({id(engine) for engine in engines}) == 1
    assert Engine.shared("toy-shared", EngineConfig(max_batch=4)) is not engines[0]
    assert engines[0].state == "new"
