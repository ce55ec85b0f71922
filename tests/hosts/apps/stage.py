"""A fake engine whose steps a test can hold, and notes of how the host's handlers ended.

While a step is held nothing is swept, so a test can make sure that every disconnect has been
noticed, let go, and then count what was still computed: no assertion needs a clock.
"""

from __future__ import annotations

import time
from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING

import anyio.to_thread
from prometheus_client import REGISTRY, CollectorRegistry
from starlette.requests import Request
from starlette.responses import JSONResponse

from qwen3_asgi import EngineConfig, SamplingParams
from qwen3_asgi.testing import FakeExecutor, StepGate, fake_engine

if TYPE_CHECKING:
    from collections.abc import Iterator

    from starlette.types import ASGIApp, Receive, Scope, Send

    from qwen3_asgi.scheduler.plan import StepPlan

STEP_SECONDS = 0.01
MAX_PREFILL_TOKENS = 64
MAX_BATCH = 6


class Stage:
    """One engine and what a test may do with it. `hold` and `release` from any thread."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self.registry = registry
        self.gate = StepGate()
        self.executor = FakeExecutor(
            num_kv_blocks=4096, block_size=16, vocab_size=512, gate=self.gate
        )
        self.executor.before_step = self._pace
        config = EngineConfig(max_batch=MAX_BATCH, max_prefill_tokens=MAX_PREFILL_TOKENS)
        self.engine = fake_engine(self.executor, config)
        self.endings: Counter[str] = Counter()

    def hold(self) -> int:
        """Wait until a step is held; returns how many were begun. Something must be running."""
        self.gate.hold()
        return self.gate.held_sync()

    def release(self) -> None:
        self.gate.open()

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Around a handler's work with the engine: note whether it finished, or what it raised."""
        try:
            yield
        except BaseException as error:
            self.endings[type(error).__name__] += 1
            raise
        self.endings["finished"] += 1

    def controlled(self, app: ASGIApp) -> ASGIApp:
        """`app`, and outside of all its middleware `/stage/…` for a test in another process."""

        async def with_control(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http" or not scope["path"].startswith("/stage/"):
                await app(scope, receive, send)
                return
            match Request(scope).url.path.removeprefix("/stage/"):
                case "hold":
                    await anyio.to_thread.run_sync(self.hold)
                case "release":
                    self.release()
            state = {"steps": self.executor.plans, "endings": dict(self.endings)}
            await JSONResponse(state)(scope, receive, send)

        return with_control

    def _pace(self, plan: StepPlan) -> None:
        del plan
        time.sleep(STEP_SECONDS)


def params(asked: dict[str, int]) -> SamplingParams:
    """Sampling of a host's own endpoint."""
    return SamplingParams(max_tokens=asked["max_tokens"])
