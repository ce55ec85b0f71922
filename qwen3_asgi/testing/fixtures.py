"""pytest fixtures, for a conftest.py: `pytest_plugins = ["qwen3_asgi.testing.fixtures"]`.

They are synchronous, so they work with every plugin for async tests, and without one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from qwen3_asgi.testing.checks import assert_idle
from qwen3_asgi.testing.engine import fake_engine, use_fake_models
from qwen3_asgi.testing.gate import StepGate
from qwen3_asgi.testing.transport import DisconnectingClient

if TYPE_CHECKING:
    from collections.abc import Iterator

    from qwen3_asgi.engine.engine import Engine
    from qwen3_asgi.testing.engine import FakeModels

# A test that waits for a held step to end fails after so long, and says that it was held.
GUARD_SECONDS = 10.0


@pytest.fixture
def step_gate() -> StepGate:
    """Holds the steps of the engines of `fake_models` and of `qwen3_engine`; open at first."""
    return StepGate(guard_seconds=GUARD_SECONDS)


@pytest.fixture
def fake_models(step_gate: StepGate) -> Iterator[FakeModels]:
    """Every engine that starts during the test has a fake model; set its `replies`."""
    with use_fake_models(gate=step_gate) as models:
        yield models


@pytest.fixture
def qwen3_engine(step_gate: StepGate) -> Iterator[Engine]:
    """A started engine with a fake model. The test must leave it idle."""
    engine = fake_engine(gate=step_gate)
    engine.start_sync()
    try:
        yield engine
        step_gate.open()
        assert_idle(engine)
    finally:
        step_gate.open()
        engine.stop_sync(drain=0)


@pytest.fixture
def disconnecting_client() -> type[DisconnectingClient]:
    """`async with disconnecting_client(app) as client:`; see `DisconnectingClient`."""
    return DisconnectingClient
