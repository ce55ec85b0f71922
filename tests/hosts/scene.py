"""A host app in process on an engine whose steps are held: one client leaves, others stay.

The disconnect is noticed while a step is held, so whatever begins after it is counted exactly.
"""

from __future__ import annotations

import gc
import logging
from collections import Counter
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel
import httpx

from qwen3_asgi.testing import DisconnectingASGITransport
from qwen3_asgi.testing.fake_executor import generate as fake_output
from tests.engine.engines import GUARD_SECONDS, LONG, settle, tokens

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    import pytest
    from starlette.types import ASGIApp

    from tests.engine.engines import Gate
    from tests.hosts.apps.stage import Stage

LEAVER: dict[str, Any] = {"prompt": "a story for one who leaves", "max_tokens": LONG.max_tokens}
STAYS: dict[str, Any] = {"prompt": "something short", "max_tokens": 7}
ALONE = "what nobody may disturb"


class Scene:
    """One stage. `leave` is the whole story; the rest are its parts, for other stories."""

    def __init__(self, stage: Stage, gate: Gate, caplog: pytest.LogCaptureFixture) -> None:
        self.stage = stage
        self.gate = gate
        self.engine = stage.engine
        self._caplog = caplog

    @asynccontextmanager
    async def client(self, app: ASGIApp, **headers: str) -> AsyncIterator[httpx.AsyncClient]:
        with anyio.fail_after(GUARD_SECONDS):
            async with httpx.AsyncClient(
                transport=DisconnectingASGITransport(app),
                base_url="http://test",
                headers={"accept-encoding": "identity", **headers},
                timeout=GUARD_SECONDS,
            ) as client:
                yield client

    async def until(self, holds: Callable[[], object]) -> None:
        with anyio.fail_after(GUARD_SECONDS):
            while not holds():
                await anyio.lowlevel.checkpoint()

    async def live(self, count: int) -> None:
        """Return when so many requests were submitted and have not ended."""
        await self.until(lambda: len(self.engine._running().delivery) == count)

    async def step(self) -> None:
        """Let the held step go and return when the next one is held."""
        arrived = self.gate.arrived
        self.gate.allow(1)
        await self.gate.held(arrived + 1)

    def counted(self, name: str) -> float:
        return sum(
            sample.value
            for family in self.stage.registry.collect()
            for sample in family.samples
            if sample.name == name
        )

    async def disconnect_noticed(self, before: float) -> None:
        await self.until(lambda: self.counted("qwen3_asgi_client_disconnects_total") == before + 1)

    def rows_of(self, prompt: str, since: int = 0) -> int:
        """How many rows of this prompt's request were computed since that index of `rows`."""
        rows = self.stage.executor.rows
        first = self.engine.tokenizer.encode(prompt)
        ids = {row.request_id for row in rows if row.start == 0 and list(row.token_ids) == first}
        return sum(row.request_id in ids for row in rows[since:])

    async def leave(
        self,
        app: ASGIApp,
        path: str,
        *,
        mid_stream: bool = False,
        body: dict[str, Any] | None = None,
        stays: str = "/generate",
        **headers: str,
    ) -> None:
        """A client leaves `path` before its answer or in the middle of it.

        Not one row may be computed for it after that, the one who stays at `stays` gets all of its
        answer, so does a generation outside of any request, the engine ends idle and nobody logs
        an error.
        """
        fields = body or {}
        reading = anyio.Event()
        answers: list[httpx.Response] = []
        alone: list[list[int]] = []

        async def leaver(scope: anyio.CancelScope) -> None:
            with scope:
                request = http.stream("POST", path, json=LEAVER | fields, headers=headers)
                async with request as response:
                    async for _ in response.aiter_raw():
                        reading.set()

        async def stay() -> None:
            answers.append(await http.post(stays, json=STAYS | fields | {"stream": False}))

        async def generate() -> None:
            output = await self.engine.generate(prompt=ALONE, params=tokens(9))
            alone.append(list(output.token_ids))

        before = self.counted("qwen3_asgi_client_disconnects_total")
        async with self.client(app) as http:
            async with anyio.create_task_group() as group:
                scope = anyio.CancelScope()
                group.start_soon(leaver, scope)
                await self.live(1)
                await self.gate.held(1)
                if mid_stream:
                    while not reading.is_set():
                        await self.step()
                group.start_soon(stay)
                group.start_soon(generate)
                await self.live(3)
                await self.step()  # now all three are known to the scheduler
                rows = len(self.stage.executor.rows)
                assert self.rows_of(LEAVER["prompt"]) > 0
                scope.cancel()
                await self.disconnect_noticed(before)
                self.gate.open()
            assert self.rows_of(LEAVER["prompt"], since=rows) == 0
            assert answers[0].status_code == 200
            assert said(answers[0]) == STAYS["max_tokens"]
            prompt = self.engine.tokenizer.encode(ALONE)
            assert alone == [fake_output(prompt, 9, self.stage.executor.vocab_size)]
            again = await http.post(stays, json=STAYS | fields | {"stream": False})
            assert said(again) == STAYS["max_tokens"]
            await settle(self.engine)
        assert self.counted("qwen3_asgi_client_disconnects_total") == before + 1
        self.nobody_complained()

    def nobody_complained(self) -> None:
        """No error in any log, and no task that failed unheard."""
        gc.collect()
        complaints = [
            f"{record.getMessage()} {record.exc_info or ''}"
            for record in self._caplog.records
            if record.levelno >= logging.ERROR
            or (record.levelno >= logging.WARNING and record.name.startswith("qwen3_asgi"))
        ]
        assert not complaints

    def told(self, count: int = 1) -> Counter[str]:
        """How the leavers' handlers ended, the two finished ones of a `leave` aside."""
        ends = Counter(self.stage.endings)
        del ends["finished"]
        assert sum(ends.values()) == count, self.stage.endings
        return ends


def said(response: httpx.Response) -> int:
    """The number of tokens in a host's own answer or in that of the mounted app."""
    answer = response.json()
    count: int = answer["tokens"] if "tokens" in answer else answer["usage"]["completion_tokens"]
    return count
