"""A stage for the tests of the watch, and a failure for a test that blocks the event loop."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from blockbuster import blockbuster_ctx

from tests.asgi.staged import Stage
from tests.engine.engines import Gate, executor, running, toy_engine

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator


@pytest.fixture(autouse=True)
def nothing_blocks_the_event_loop() -> Iterator[None]:
    """Blocking calls under `qwen3_asgi` count; a test's own waiting does not."""
    with blockbuster_ctx("qwen3_asgi") as detector:
        # Building an engine looks whether its model is a folder.
        detector.functions["os.stat"].can_block_in("engine/loading.py", {"served_name"})
        yield


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    fake = executor()
    gate = Gate(fake)
    async with running(toy_engine(fake), gate) as engine:
        yield Stage(fake, gate, engine)
