"""A raw ASGI app beside its test, on a real engine whose steps are held. The fixture is `stage`."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel

from qwen3_asgi.asgi.watch import DisconnectWatch
from qwen3_asgi.errors import ClientDisconnected
from tests.asgi.wire import END, START, Wire, http_scope
from tests.engine.engines import GUARD_SECONDS, LONG, Gate, settle

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from starlette.types import ASGIApp, Scope, Send

    from qwen3_asgi.asgi.watch import CancelPolicy
    from qwen3_asgi.engine.engine import Engine
    from qwen3_asgi.testing import FakeExecutor


class Stage:
    """An engine whose steps are held, and what a test's app has noted."""

    def __init__(self, fake: FakeExecutor, gate: Gate, engine: Engine) -> None:
        self.fake = fake
        self.gate = gate
        self.engine = engine
        self.notes: list[Any] = []

    async def generate(self) -> None:
        """A handler's body: generate, and note how it ended; cleaning up may await."""
        try:
            await self.engine.generate(prompt="hello", params=LONG)
        except ClientDisconnected as error:
            await anyio.lowlevel.checkpoint()
            self.notes.append(error)
            raise
        finally:
            self.notes.append("cleaned up")

    async def live(self, count: int) -> None:
        """Return when so many requests were submitted."""
        with anyio.fail_after(GUARD_SECONDS):
            while self.engine.live_requests < count:
                await anyio.lowlevel.checkpoint()

    async def gone(self, *, steps: int = 1) -> None:
        """The scheduler holds nothing any more, and no step was begun since."""
        self.gate.allow(1)
        await settle(self.engine)
        assert self.fake.plans <= steps
        self.gate.open()


@asynccontextmanager
async def served(app: ASGIApp, wire: Wire, *, scope: Scope | None = None) -> AsyncIterator[None]:
    """Run the app beside the test; what it raises is raised at the end, as a server sees it."""
    errors: list[BaseException] = []

    async def serve() -> None:
        try:
            await app(http_scope() if scope is None else scope, wire.receive, wire.send)
        except Exception as error:
            errors.append(error)

    with anyio.fail_after(GUARD_SECONDS):
        async with anyio.create_task_group() as group:
            group.start_soon(serve)
            yield
    if errors:
        raise errors[0]


def watched(app: ASGIApp, cancel: CancelPolicy = "generations") -> DisconnectWatch:
    return DisconnectWatch(app, cancel=cancel)


async def answer(send: Send) -> None:
    await send(START)
    await send(END)
