"""A scene for the tests in process."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import pytest
from prometheus_client import CollectorRegistry

from tests.engine.engines import Gate, running
from tests.hosts.apps.stage import Stage
from tests.hosts.scene import Scene

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@pytest.fixture
async def scene(caplog: pytest.LogCaptureFixture) -> AsyncIterator[Scene]:
    stage = Stage(CollectorRegistry())
    gate = Gate(stage.executor)
    stage.engine.metrics(registry=stage.registry)
    async with running(stage.engine, gate):
        await stage.engine.start()
        yield Scene(stage, gate, caplog)
    gc.collect()  # dropped generators here, not in the next test
