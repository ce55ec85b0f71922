"""The clients of the chaos: over HTTP, in threads and on event loops; half of them leave early.

Each works on its own until it is told to stop, and says of every request how it ended.
"""

from __future__ import annotations

import http.client
import json
import random
import socket
import struct
import threading
import time
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio

from qwen3_asgi.bench.chaos_world import ADAPTERS, INJECTED
from qwen3_asgi.errors import (
    EngineOverloaded,
    GenerationFailed,
    GenerationTimeout,
    InvalidRequest,
    Qwen3Error,
)
from qwen3_asgi.openai.errors import error_body

if TYPE_CHECKING:
    from collections.abc import Callable

    from qwen3_asgi.bench.chaos_world import Job, Jobs, World
    from qwen3_asgi.bench.wire import Target
    from qwen3_asgi.engine.handle import RequestHandle

# The moment at which a client leaves is drawn from this many seconds.
LONGEST_STAY = 1.0
PATIENCE_SECONDS = 300.0
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: closing sends a reset
MAX_VIOLATIONS = 100
DOORS = ("stream", "plain", "handler", "thread", "asyncio", "trio")


class Tally:
    """How requests ended, by door; and what must not happen. Any thread may write."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()
        self.violations: list[str] = []
        self.adapter_commands = 0
        self._lock = threading.Lock()

    def note(self, door: str, outcome: str) -> None:
        with self._lock:
            self.counts[door, outcome] += 1

    def violate(self, what: str) -> None:
        with self._lock:
            if len(self.violations) < MAX_VIOLATIONS:
                self.violations.append(what)

    def total(self, outcome: str) -> int:
        return sum(count for (_, name), count in self.counts.items() if name == outcome)


class Clients:
    """All clients, each on a thread of its own; those of an event loop share its thread."""

    def __init__(
        self, world: World, jobs: Jobs, target: Target, *, leave: float, count: int, seed: int
    ) -> None:
        self.tally = Tally()
        self._world = world
        self._jobs = jobs
        self._target = target
        self._leave = leave
        self._stop = threading.Event()
        dice = [random.Random(f"{seed} {number}") for number in range(count)]
        by_door = {door: dice[number :: len(DOORS)] for number, door in enumerate(DOORS)}
        works: list[Callable[[], None]] = [
            partial(self._http, door, rng)
            for door in ("stream", "plain", "handler")
            for rng in by_door[door]
        ]
        works += [partial(self._thread, rng) for rng in by_door["thread"]]
        works += [partial(self._loop, backend, by_door[backend]) for backend in ("asyncio", "trio")]
        works.append(partial(self._adapters, random.Random(f"{seed} adapters")))
        self._threads = [
            threading.Thread(target=self._work, args=(work,), name="chaos client") for work in works
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """No client begins another request; returns when the last has ended."""
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _work(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            self.tally.violate(f"a client died: {error!r}")

    def _stay(self, rng: random.Random) -> float | None:
        """When the client leaves, in seconds; None: it stays to the end."""
        return rng.uniform(0.0, LONGEST_STAY) ** 2 if rng.random() < self._leave else None

    # ---- over HTTP ----

    def _http(self, door: str, rng: random.Random) -> None:
        while not self._stop.is_set():
            job, stay = self._jobs.draw(rng), self._stay(rng)
            body = {
                "prompt": job.prompt,
                "max_tokens": job.max_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "n": job.n,
                "stream": door == "stream",
                "model": job.adapter or self._world.engine.model_name,
                **({} if job.timeout is None else {"timeout": job.timeout}),
            }
            path = "/handler" if door == "handler" else "/llm/v1/completions"
            begin = time.monotonic()
            connection = self._target.send("POST", path, body)
            try:
                connection.settimeout(PATIENCE_SECONDS if stay is None else max(0.001, stay))
                reply = http.client.HTTPResponse(connection)
                said = b""
                try:
                    reply.begin()
                    while chunk := reply.read1(65536):
                        said += chunk
                        if stay is not None:
                            left = begin + stay - time.monotonic()
                            connection.settimeout(max(0.001, left))
                            if left <= 0:
                                raise TimeoutError
                except TimeoutError:
                    if stay is None:
                        self.tally.violate(f"{door}: no answer for {PATIENCE_SECONDS:g} s")
                    self.tally.note(door, "left")
                    if rng.random() < 0.5:
                        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                    continue
                self._judge(door, job, *_texts(said, stream=door == "stream"))
            finally:
                connection.close()

    def _judge(
        self, door: str, job: Job, said: list[str] | list[list[int]], error: dict[str, Any] | None
    ) -> None:
        """Compare an answer, or see whether the error is one that had to be expected."""
        if error is not None:
            code, message = error.get("code"), str(error.get("message"))
            expected = {
                "generation_failed": ("failed", INJECTED in message),
                "generation_timeout": ("late", job.timeout is not None),
                "model_not_found": ("refused", job.adapter is not None),
                "engine_overloaded": ("refused", True),
            }
            outcome, fits = expected.get(str(code), ("", False))
            if fits:
                self.tally.note(door, outcome)
            else:
                self.tally.violate(f"{door}: unexpected {error}")
            return
        right: Any = job.text if door in ("stream", "plain") else list(job.token_ids)
        if said != [right] * job.n:
            about = f"n={job.n} max_tokens={job.max_tokens} adapter={job.adapter}"
            self.tally.violate(
                f"{door}: wrong answer ({about}) to {job.prompt}: {said}, not {right}"
            )
        self.tally.note(door, "right")

    # ---- in this process ----

    def _thread(self, rng: random.Random) -> None:
        while not self._stop.is_set():
            job = self._jobs.draw(rng)
            # A thread leaves between two batches, or before the first.
            stay = rng.randrange(job.max_tokens) if rng.random() < self._leave else None
            said: list[list[int]] = [[] for _ in range(job.n)]
            try:
                handle = self._world.engine.submit_sync(**job.asked)
                leaves = False
                for number, batch in enumerate(handle.read_sync()):
                    leaves = number == stay
                    if leaves:
                        break
                    said[batch.choice] += [token.token_id for token in batch.tokens]
                if leaves:
                    if rng.random() < 0.5:
                        handle.cancel()  # the other half just forgets it
                    self.tally.note("thread", "left")
                    del handle
                    continue
            except Qwen3Error as error:
                self._judge("thread", job, [], error_of(error))
            else:
                self._judge("thread", job, said, None)

    def _loop(self, backend: str, dice: list[random.Random]) -> None:
        async def main() -> None:
            async with anyio.create_task_group() as group:
                for rng in dice:
                    group.start_soon(self._task, backend, rng)

        anyio.run(main, backend=backend)

    async def _task(self, backend: str, rng: random.Random) -> None:
        while not self._stop.is_set():
            job, stay = self._jobs.draw(rng), self._stay(rng)
            said: list[list[int]] = [[] for _ in range(job.n)]
            handle: RequestHandle | None = None
            try:
                with anyio.move_on_after(stay) as scope:
                    handle = await self._world.engine.submit(**job.asked)
                    async for batch in handle:
                        said[batch.choice] += [token.token_id for token in batch.tokens]
                if scope.cancelled_caught:
                    if handle is not None and rng.random() < 0.5:
                        handle.cancel()
                    self.tally.note(backend, "left")
                    continue
            except Qwen3Error as error:
                self._judge(backend, job, [], error_of(error))
            else:
                self._judge(backend, job, said, None)

    def _adapters(self, rng: random.Random) -> None:
        """Adapters go and come back; who names one that is gone is refused."""
        engine = self._world.engine
        while not self._stop.wait(rng.uniform(0.0, 0.5)):
            name = rng.choice(ADAPTERS)
            if rng.random() < 0.5:  # else it is replaced
                engine.unload_adapter_sync(name)
                self._stop.wait(rng.uniform(0.0, 0.05))
            engine.load_adapter_sync(name, self._world.adapter_paths[name])
            self.tally.adapter_commands += 1


def error_of(error: Qwen3Error) -> dict[str, Any]:
    """An error as the wire has it."""
    match error:
        case InvalidRequest():
            code = error.code
        case GenerationFailed():
            code = "generation_failed"
        case GenerationTimeout():
            code = "generation_timeout"
        case EngineOverloaded():
            code = "engine_overloaded"
        case _:
            code = type(error).__name__
    body: dict[str, Any] = error_body(str(error), type="chaos", code=code)["error"]
    return body


def _texts(said: bytes, *, stream: bool) -> tuple[Any, dict[str, Any] | None]:
    """What the choices say, in order; or the error."""
    if not stream:
        body = json.loads(said)
        if "error" in body:
            return [], body["error"]
        if "token_ids" in body:
            return body["token_ids"], None
        choices = sorted(body["choices"], key=lambda choice: int(choice["index"]))
        return [choice["text"] for choice in choices], None
    if said.startswith(b"{"):
        return [], json.loads(said)["error"]
    texts: dict[int, str] = {}
    events = [line[6:] for line in said.decode().split("\n") if line.startswith("data: ")]
    if not events:
        return [], {"code": "no event", "message": said[:200].decode(errors="replace")}
    for event in events:
        if event == "[DONE]":
            continue
        body = json.loads(event)
        if "error" in body:
            return [], body["error"]
        for choice in body["choices"]:
            index = choice["index"]
            texts[index] = texts.get(index, "") + choice["text"]
    if events[-1] != "[DONE]":
        return [], {"code": "cut off", "message": events[-1][:200]}
    return [texts[index] for index in sorted(texts)], None
