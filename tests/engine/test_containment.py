"""Faults: who ends with them and who does not, when the engine gives up, and how it comes back."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel
import httpx
import pytest
from prometheus_client import CollectorRegistry

from qwen3_asgi.app import create_app
from qwen3_asgi.config import EngineConfig, SamplingParams
from qwen3_asgi.engine.engine import Engine
from qwen3_asgi.errors import (
    EngineDead,
    EngineNotReady,
    GenerationCancelled,
    GenerationFailed,
)
from tests.engine.engines import (
    GUARD_SECONDS,
    LONG,
    Gate,
    executor,
    expected,
    running,
    settle,
    tokens,
    toy_engine,
)
from tests.engine.loader import Loader

if TYPE_CHECKING:
    import torch

    from qwen3_asgi.engine.handle import RequestHandle
    from qwen3_asgi.scheduler.plan import StepPlan
    from qwen3_asgi.testing import FakeExecutor

pytestmark = pytest.mark.anyio

GAUGES = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")


async def read(handle: RequestHandle) -> list[int]:
    with anyio.fail_after(GUARD_SECONDS):
        return [token.token_id async for batch in handle for token in batch.tokens]


def gauges(registry: CollectorRegistry) -> list[float]:
    return [
        sample.value
        for family in registry.collect()
        if family.name in GAUGES
        for sample in family.samples
    ]


async def dead(engine: Engine) -> None:
    """Return when its thread has ended."""
    with anyio.fail_after(GUARD_SECONDS):
        while engine.state != "dead":
            await anyio.lowlevel.checkpoint()


# ---- a step fails ----


async def test_a_failed_step_ends_who_was_in_it_and_nobody_else() -> None:
    fake = executor()
    gate = Gate(fake)
    async with running(toy_engine(fake, EngineConfig(max_batch=2)), gate) as engine:
        inside = [await engine.submit(prompt=f"in {i}", params=LONG) for i in range(2)]
        outside = [
            await engine.submit(prompt_token_ids=[i, 2, 3], params=tokens(5)) for i in range(3)
        ]
        gate.allow(3)
        await gate.held(4)
        gate.fail(RuntimeError("boom"))
        gate.open()
        for handle in inside:
            with pytest.raises(GenerationFailed, match="RuntimeError: boom"):
                await read(handle)
        for i, handle in enumerate(outside):
            assert await read(handle) == expected([i, 2, 3], 5)
        await settle(engine)
        assert engine.state == "ready"


async def test_a_request_that_always_fails_takes_nobody_along_by_itself() -> None:
    """Its row alone fails, time and again; the steps do not, so the engine does not give up."""
    fake = executor()
    poisoned = 0

    def spoil(plan: StepPlan) -> None:
        nonlocal poisoned
        for row in plan.rows:
            if row.kind == "prefill" and row.token_ids[0] == 13:
                fake.row_errors[row.request_id] = "NaN logits"
                poisoned += 1

    fake.before_step = spoil
    async with running(toy_engine(fake, EngineConfig(max_failures=2))) as engine:
        healthy = await engine.submit(prompt_token_ids=[1, 2, 3], params=tokens(300))
        for _ in range(5):
            with pytest.raises(GenerationFailed, match="NaN logits"):
                await engine.generate(prompt_token_ids=[13, 2], params=LONG)
        assert await read(healthy) == expected([1, 2, 3], 300)
        assert poisoned == 5
        assert engine.state == "ready"
        await settle(engine)


async def test_failures_with_successes_between_them_are_no_reason_to_give_up() -> None:
    fake = executor()
    gate = Gate(fake, open=True)
    async with running(toy_engine(fake, EngineConfig(max_failures=2)), gate) as engine:
        for _ in range(4):
            gate.fail(RuntimeError("boom"))
            with pytest.raises(GenerationFailed):
                await engine.generate(prompt="hello", params=LONG)
            await engine.generate(prompt="hello", params=tokens(2))
        assert engine.state == "ready"


# ---- the engine gives up ----


async def give_up(engine: Engine, gate: Gate, fake: FakeExecutor, *, by: str) -> str:
    """Let the engine die with requests running and waiting; returns why it did."""
    running = await engine.submit(prompt="running", params=LONG)
    await gate.held()
    waiting = [await engine.submit(prompt="waiting", params=LONG) for _ in range(4)]

    def quit_thread(plan: StepPlan) -> None:
        raise SystemExit("a signal handler, say")

    if by == "failures":
        for _ in range(2):
            gate.fail(RuntimeError("boom"))
        reason = "2 steps in a row have failed, the last with RuntimeError('boom')"
    elif by == "the executor":
        gate.fail(EngineDead("the device is lost"))
        reason = "the device is lost"
    else:
        fake.before_step = quit_thread
        reason = "SystemExit('a signal handler, say')"
    gate.open()
    with pytest.raises((GenerationFailed, EngineDead)):
        await read(running)
    failed = 0
    for handle in waiting:
        with pytest.raises((GenerationFailed, EngineDead)) as caught:
            await read(handle)
        failed += isinstance(caught.value, GenerationFailed)
    assert failed == (1 if by == "failures" else 0)  # who was in the second failed step
    await dead(engine)
    fake.before_step = None
    return reason


@pytest.mark.parametrize("by", ["failures", "the executor", "the end of its thread"])
async def test_a_dead_engine_says_why_and_comes_back(by: str) -> None:
    fake = executor()
    gate = Gate(fake)
    registry = CollectorRegistry()
    config = EngineConfig(max_failures=2, max_batch=1)
    async with running(toy_engine(fake, config), gate) as engine:
        transport = httpx.ASGITransport(create_app(engine, registry=registry))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            reason = await give_up(engine, gate, fake, by=by)
            assert engine.live_requests == 0
            assert engine.load().idle
            assert gauges(registry) == [0.0] * 3
            health = await http.get("/health")
            assert health.status_code == 503
            assert health.json()["error"]["code"] == "engine_dead"
            assert reason in health.json()["error"]["message"]
            assert int(health.headers["retry-after"]) > 0
            with pytest.raises(EngineDead) as caught:
                await engine.submit(prompt="hello")
            assert reason in str(caught.value)
            await engine.restart()
            assert (await http.get("/health")).json() == {"status": "ok"}
            output = await engine.generate(prompt_token_ids=[1, 2], params=tokens(4))
            assert list(output.token_ids) == expected([1, 2], 4)
            await settle(engine)
            assert gauges(registry) == [0.0] * 3


# ---- restart ----


async def test_restart_works_from_every_state() -> None:
    loader = Loader()
    engine = Engine("fake", loader=loader)
    async with running(engine):
        for calls, before in enumerate(("new", "ready", "stopped"), start=1):
            if before == "stopped":
                await engine.stop()
            assert engine.state == before
            await engine.restart()
            assert (engine.state, loader.calls) == ("ready", calls)
            assert len((await engine.generate(prompt="x", params=tokens(2))).token_ids) == 2
        await anyio.to_thread.run_sync(engine.restart_sync)
        assert (engine.state, loader.calls) == ("ready", 4)


async def test_a_restart_ends_what_is_live_after_its_patience() -> None:
    fake = executor()
    gate = Gate(fake)
    async with running(toy_engine(fake), gate) as engine:
        handle = await engine.submit(prompt="hello", params=LONG)
        await gate.held(1)
        async with anyio.create_task_group() as group:
            group.start_soon(lambda: engine.restart(drain=0))
            while engine.state == "ready":
                await anyio.lowlevel.checkpoint()
            with pytest.raises(EngineNotReady, match="shutting down"):
                await engine.submit(prompt="hello")
            gate.open()
        with pytest.raises(GenerationCancelled, match="stopped"):
            await read(handle)
        assert engine.state == "ready"


async def test_a_restart_inside_a_lifespan_leaves_its_end_as_it_is() -> None:
    engine = toy_engine()
    async with engine:
        await engine.restart()
        assert len((await engine.generate(prompt="x", params=tokens(2))).token_ids) == 2
    assert engine.state == "stopped"


# ---- the model itself ----


@pytest.mark.torch
async def test_nan_logits_end_the_request_whose_they_are(monkeypatch: Any) -> None:
    from qwen3_asgi.model.qwen3 import Qwen3

    right = Qwen3.logits
    spoil = False

    def logits(self: Qwen3, hidden: torch.Tensor) -> torch.Tensor:
        found = right(self, hidden)
        if spoil and len(found) == 2:  # both decode: the second came second
            found[1, 5] = float("nan")
        return found

    monkeypatch.setattr(Qwen3, "logits", logits)
    config = EngineConfig(device="cpu", dtype="float32", num_kv_blocks=64)
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    async with running(Engine("tiny", config)) as engine:
        alone = await engine.generate(prompt="1, 2, 3,", params=params)
        spoil = True
        healthy = await engine.submit(prompt="1, 2, 3,", params=params)
        sick = await engine.submit(prompt="One, two,", params=params)
        with pytest.raises(GenerationFailed, match="NaN"):
            await read(sick)
        assert await read(healthy) == list(alone.token_ids)
        spoil = False
        again = await engine.generate(prompt="1, 2, 3,", params=params)
        assert again.token_ids == alone.token_ids
        await settle(engine)


@pytest.mark.torch
async def test_a_step_without_device_memory_gives_back_what_it_had(monkeypatch: Any) -> None:
    import torch

    from qwen3_asgi.model.qwen3 import Qwen3

    right = Qwen3.forward
    held: list[weakref.ref[torch.Tensor]] = []

    def forward(self: Qwen3, *args: Any, **kwargs: Any) -> torch.Tensor:
        if held:
            return right(self, *args, **kwargs)
        hidden = torch.zeros(1000)
        held.append(weakref.ref(hidden))
        raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {len(hidden)} MiB")

    monkeypatch.setattr(Qwen3, "forward", forward)
    config = EngineConfig(device="cpu", dtype="float32", num_kv_blocks=64)
    async with running(Engine("tiny", config)) as engine:
        with pytest.raises(GenerationFailed, match="no memory left for a step of") as caught:
            await engine.generate(prompt="hello", params=tokens(4))
        # While somebody still holds the error: its traceback must not hold the step's tensors.
        assert held[0]() is None
        assert "MemoryError" in str(caught.value)
        assert len((await engine.generate(prompt="hello", params=tokens(4))).token_ids) == 4
        await settle(engine)
