"""Runs an app's lifespan around a test, which httpx's own transport doesn't."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import anyio

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from starlette.types import ASGIApp, Message


@asynccontextmanager
async def lifespan(app: ASGIApp) -> AsyncIterator[dict[str, Any]]:
    """Start the app up, and shut it down at the end. Yields the state that it hands to requests.

    Raises:
        RuntimeError: the app says that starting up or shutting down has failed, or it returned
            without an answer. An exception of the app comes out as it was raised; an app that knows
            no lifespan (Django) raises one of its own.
    """
    run = _Run(app)
    error: BaseException | None = None
    async with anyio.create_task_group() as group:
        group.start_soon(run.serve)
        try:
            await run.tell("startup")
            if run.error is None:
                yield run.state
        except anyio.get_cancelled_exc_class():
            raise
        except BaseException as raised:  # past the task group, which would wrap it in a group
            error = raised
        finally:
            await run.end()
    try:
        if error is not None:
            raise error
        if run.error is not None:
            raise run.error
    finally:
        error = None  # a frame that refers to its own traceback is a reference cycle


class _Run:
    def __init__(self, app: ASGIApp) -> None:
        self.state: dict[str, Any] = {}
        self.error: Exception | None = None
        self._app = app
        self._told: dict[str, anyio.Event] = {p: anyio.Event() for p in ("startup", "shutdown")}
        self._answered = {phase: anyio.Event() for phase in self._told}
        self._asked = 0
        # A test that is cancelled must not take the app's cleaning up with it.
        self._shield = anyio.CancelScope(shield=True)

    async def serve(self) -> None:
        scope = {
            "type": "lifespan",
            "asgi": {"version": "3.0", "spec_version": "2.0"},
            "state": self.state,
        }
        try:
            with self._shield:
                await self._app(scope, self._receive, self._send)
            if not self._answered["startup"].is_set():
                raise RuntimeError("the app returned without answering its lifespan's startup")
        except Exception as error:
            if self.error is None:
                self.error = error
            else:
                self.error.__cause__ = error
        finally:
            for answered in self._answered.values():
                answered.set()

    async def tell(self, phase: str) -> None:
        """Returns when the app has answered, or ended."""
        self._told[phase].set()
        await self._answered[phase].wait()

    async def end(self) -> None:
        """Shut the app down; one that has not started up by now is cancelled."""
        if not self._answered["startup"].is_set():
            self._shield.cancel()
        with anyio.CancelScope(shield=True):
            await self.tell("shutdown")

    async def _receive(self) -> Message:
        phase = "shutdown" if self._asked else "startup"
        self._asked += 1
        await self._told[phase].wait()
        return {"type": f"lifespan.{phase}"}

    async def _send(self, message: Message) -> None:
        _, phase, outcome = message["type"].split(".")
        if outcome == "failed":
            self.error = RuntimeError(f"the app's {phase} failed: {message.get('message', '')}")
        self._answered[phase].set()
