"""A step that runs too long is reported, once; who watches sleeps while nothing is live."""

from __future__ import annotations

import logging
import sys
import threading
from typing import TYPE_CHECKING

import httpx
import pytest
from prometheus_client import CollectorRegistry

from qwen3_asgi.app import create_app
from qwen3_asgi.config import EngineConfig
from qwen3_asgi.engine.watchdog import Watchdog
from tests.engine.engines import (
    Gate,
    executor,
    running,
    settle,
    tokens,
    toy_engine,
    until,
)

if TYPE_CHECKING:
    from qwen3_asgi.engine.engine import Engine

SOON = 0.01
LOGGER = "qwen3_asgi.engine.watchdog"


class Steps:
    """Stands for a scheduler: which step runs since when."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.running_since: float | None = None


def watchdog(steps: Steps, reports: list[float]) -> Watchdog:
    return Watchdog(
        steps,  # type: ignore[arg-type]
        [],  # type: ignore[arg-type]
        30.0,
        lambda: reports.append(steps.now),
        name="toy",
        clock=lambda: steps.now,
    )


def test_it_looks_again_exactly_when_the_running_step_is_due() -> None:
    steps, reports = Steps(), list[float]()
    dog = watchdog(steps, reports)
    ident = threading.get_ident()
    assert dog.look(30.0, ident) == 30.0  # between two steps
    steps.running_since = 995.0
    assert dog.look(30.0, ident) == 25.0
    steps.now = 1024.999
    assert dog.look(30.0, ident) == pytest.approx(0.001)
    assert reports == []
    assert dog.stalled_seconds is None


def test_each_long_step_is_reported_once_with_its_stack(caplog: pytest.LogCaptureFixture) -> None:
    steps, reports = Steps(), list[float]()
    dog = watchdog(steps, reports)
    ident = threading.get_ident()
    steps.running_since = 960.0
    for _ in range(3):
        assert dog.look(30.0, ident) == 30.0
        assert dog.stalled_seconds == steps.now - 960.0
        steps.now += 30
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert "a step has been running for 40.0 s" in record.getMessage()
    assert "test_each_long_step_is_reported_once_with_its_stack" in record.getMessage()
    steps.running_since = steps.now  # the next one
    assert dog.look(30.0, ident) == 30.0
    assert dog.stalled_seconds is None
    steps.now += 31
    dog.look(30.0, ident)
    assert reports == [1000.0, steps.now]


# Engines that other tests have left to the end of the process.
_EARLIER: set[threading.Thread] = set()


@pytest.fixture(autouse=True)
def _earlier() -> None:
    _EARLIER.clear()
    _EARLIER.update(threading.enumerate())


def watching(engine: Engine) -> threading.Thread | None:
    threads = [
        thread
        for thread in threading.enumerate()
        if thread.name == f"qwen3-asgi {engine.model} watchdog" and thread not in _EARLIER
    ]
    assert len(threads) <= 1
    return threads[0] if threads else None


def sleeps_without_a_timeout(thread: threading.Thread) -> bool:
    frame = sys._current_frames().get(thread.ident or 0)
    while frame is not None:
        if frame.f_code is threading.Event.wait.__code__:
            return frame.f_locals["timeout"] is None
        frame = frame.f_back
    return False


@pytest.mark.anyio
@pytest.mark.parametrize("overlap", [False, True])
async def test_a_stalled_step_is_told_in_the_log_the_metrics_and_the_health(
    caplog: pytest.LogCaptureFixture, overlap: bool
) -> None:
    fake = executor()
    gate = Gate(fake)
    registry = CollectorRegistry()
    config = EngineConfig(step_warn_seconds=SOON, overlap=overlap)
    async with running(toy_engine(fake, config), gate) as engine:
        app = create_app(engine, registry=registry)
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            assert (await http.get("/health")).json() == {"status": "ok"}
            handle = await engine.submit(prompt="hello", params=tokens(2))
            await gate.held(1)
            await until(lambda: any(record.name == LOGGER for record in caplog.records))
            stalled = await http.get("/health")
            assert stalled.status_code == 200
            assert stalled.json()["status"] == "stalled"
            assert "a step has been running for" in stalled.json()["detail"]
            text = (await http.get("/metrics")).text
            [record] = [record for record in caplog.records if record.name == LOGGER]
            assert "in enter" in record.getMessage()  # the gate, on the thread that runs the step
            # Before it opens: the metric has one stalled step, however long it stalls.
            assert 'qwen3_asgi_stalled_steps_total{engine="' in text
            counted = [line for line in text.splitlines() if "stalled_steps_total{" in line]
            assert [line.rsplit(" ")[-1] for line in counted] == ["1.0"]
            handle.cancel()
            gate.open()
            await settle(engine)
            assert (await http.get("/health")).json() == {"status": "ok"}
            assert engine.stalled_seconds is None


@pytest.mark.anyio
async def test_it_sleeps_while_nothing_is_live_and_wakes_for_a_request() -> None:
    fake = executor()
    gate = Gate(fake, open=True)
    async with running(toy_engine(fake, EngineConfig(step_warn_seconds=SOON)), gate) as engine:
        await engine.start()
        thread = watching(engine)
        assert thread is not None
        for _ in range(3):
            await until(lambda: sleeps_without_a_timeout(thread))
            gate.hold()
            handle = await engine.submit(prompt="hello", params=tokens(2))
            await until(lambda: not sleeps_without_a_timeout(thread))
            await until(lambda: engine.stalled_seconds is not None)
            gate.open()
            assert [batch async for batch in handle][-1].finish is not None


@pytest.mark.anyio
async def test_it_ends_with_the_engine_and_comes_back_with_it() -> None:
    async with running(toy_engine()) as engine:
        assert watching(engine) is None
        await engine.start()
        first = watching(engine)
        assert first is not None
        await engine.restart()
        assert not first.is_alive()
        assert watching(engine) not in (None, first)
    assert watching(engine) is None


@pytest.mark.anyio
async def test_without_a_limit_nothing_watches() -> None:
    fake = executor()
    gate = Gate(fake)
    async with running(toy_engine(fake, EngineConfig(step_warn_seconds=None)), gate) as engine:
        handle = await engine.submit(prompt="hello", params=tokens(2))
        await gate.held(1)
        assert watching(engine) is None
        assert engine.stalled_seconds is None
        handle.cancel()
