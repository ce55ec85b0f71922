"""Scenes for `test_fork.py`: each runs in a process of its own, forks, and prints what was seen.

    python -m tests.engine.fork_scenes SCENE

The test process has threads of every kind, so it is never forked itself.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import threading
import time
import traceback
import warnings
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import anyio
import httpx
from prometheus_client import CollectorRegistry

from qwen3_asgi import Engine, EngineConfig, Qwen3Error, SamplingParams, create_app
from qwen3_asgi.engine import lifecycle, process
from qwen3_asgi.metrics import families
from qwen3_asgi.testing import DisconnectingASGITransport, FakeExecutor
from tests.engine.engines import GUARD_SECONDS, Gate, executor, tokens, toy_engine
from tests.engine.loader import Door, Loader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from qwen3_asgi.engine.handle import RequestHandle

Seen = dict[str, Any]
PROMPT = [1, 2, 3]


def in_child(look: Callable[[], Seen]) -> Seen:
    """Fork; what `look` saw in the child, which then ends as any Python program does."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # 3.12: forked with threads
        pid = os.fork()
    if pid == 0:
        os.close(reader)
        try:
            seen = look()
        except SystemExit:
            raise  # of a grandchild, on its way out
        except BaseException:
            seen = {"failed": traceback.format_exc()}
        with open(writer, "w") as pipe:
            json.dump(seen, pipe)
        sys.exit(0)  # through the exit hooks that came along
    os.close(writer)
    with open(reader) as pipe:
        seen = json.load(pipe)
    seen["exit"] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return seen


def told(use: Callable[[], object]) -> str:
    """The error that a use of the engine ends with."""
    try:
        use()
    except Qwen3Error as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def read(handle: RequestHandle) -> list[int]:
    return [token.token_id for batch in handle.read_sync() for token in batch.tokens]


def ids(engine: Engine, count: int = 5) -> list[int]:
    return list(engine.generate_sync(prompt_token_ids=PROMPT, params=tokens(count)).token_ids)


def running_gauge(registry: CollectorRegistry) -> float | None:
    names = {"model_name": "fake", "engine": "0"}
    return registry.get_sample_value("vllm:num_requests_running", names)


def over_http(engine: Engine, registry: CollectorRegistry) -> Seen:
    async def ask() -> Seen:
        app = create_app(engine, registry=registry)
        transport = DisconnectingASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            body = {"model": engine.model_name, "prompt": "x", "max_tokens": 2}
            return {
                "/health": (await client.get("/health")).status_code,
                "/ready": (await client.get("/ready")).status_code,
                "/load": (await client.get("/load")).json()["num_running"],
                "completion": (await client.post("/v1/completions", json=body)).json(),
            }

    return anyio.run(ask)


@contextmanager
def held_by_another_thread(*locks: Any) -> Iterator[None]:
    """Every lock is taken at the fork, so in the child nobody would ever release it."""
    taken, done = threading.Event(), threading.Event()

    def hold() -> None:
        with ExitStack() as stack:
            for lock in locks:
                stack.enter_context(lock)
            taken.set()
            done.wait(GUARD_SECONDS)

    thread = threading.Thread(target=hold)
    thread.start()
    taken.wait(GUARD_SECONDS)
    yield
    done.set()
    thread.join()


def started() -> Seen:
    """Forked in the middle of a step, with one generation live."""
    # A hook that waits for the parent's thread in the child would wait until the test gives up.
    lifecycle.EXIT_SECONDS = 10.0**6
    fake = executor()
    gate = Gate(fake)
    engine = toy_engine(fake)
    registry = CollectorRegistry()
    engine.metrics(registry)
    handle = engine.submit_sync(prompt_token_ids=PROMPT, params=tokens(9))
    gate.held_sync(1)
    parent = os.getpid()

    def child() -> Seen:
        gate.open()
        seen: Seen = {
            "state": engine.state,
            "load": engine.load().num_running,
            "gauge": running_gauge(registry),
            "use": told(lambda: ids(engine)),
            "use on a loop": told(lambda: anyio.run(lambda: engine.submit(prompt="x"))),
            "start on first use": told(engine.start_soon),
            "inherited handle": told(lambda: read(handle)),
            "http": over_http(engine, registry),
        }
        engine.stop_sync()
        engine.start_sync()
        seen["restarted"] = [engine.state, ids(engine), running_gauge(registry)]
        engine.stop_sync()
        seen["stopped"] = engine.state
        return seen

    seen = {"child": in_child(child), "parent gauge": running_gauge(registry)}
    gate.open()
    seen["parent"] = [engine.state, read(handle), ids(engine), os.getpid() == parent]
    engine.stop_sync()
    return seen


def locks() -> Seen:
    """Forked while another thread holds every lock of ours that a child needs."""
    lifecycle.EXIT_SECONDS = 10.0**6
    engine, registry = toy_engine(), CollectorRegistry()
    engine.metrics(registry)
    engine.start_sync()
    shared = Engine.shared("toy-shared")

    def child() -> Seen:
        refused = told(lambda: ids(engine))
        engine.start_sync()
        engine.metrics(registry)
        engine.metrics(CollectorRegistry())
        seen = {"refused": refused, "ids": ids(engine), "scrape": running_gauge(registry)}
        engine.stop_sync()
        seen["shared"] = Engine.shared("toy-shared") is shared
        shared.metrics(registry)
        return seen

    shared.metrics(registry)
    gauge = engine._metrics._instruments._gauges["vllm:num_requests_running"]
    with held_by_another_thread(
        process._lock,
        engine._lifecycle._lock,
        engine._running().delivery._lock,
        engine._metrics._load_lock,
        families._collectors_lock,
        families._collectors[registry]._lock,
        gauge.labels("fake", "0")._value._lock,
    ):
        seen = in_child(child)
    engine.stop_sync()
    return seen


def constructed() -> Seen:
    """Merely constructed, and attached to a registry: in the child it is as new."""
    loader = Loader()
    engine, registry = Engine("fake", loader=loader), CollectorRegistry()
    engine.metrics(registry)

    def child() -> Seen:
        seen = {"state": engine.state, "ids": ids(engine), "gauge": running_gauge(registry)}
        return {**seen, "calls": loader.calls, "http": over_http(engine, registry)["/health"]}

    seen: Seen = {"children": [in_child(child), in_child(child)]}
    seen["parent"] = [engine.state, loader.calls, ids(engine)]
    engine.stop_sync()
    return seen


def unfinished() -> Seen:
    """Forked while it loads, while it stops, after it was stopped, and after it died."""
    seen: Seen = {}

    def child(engine: Engine) -> Seen:
        found = {"state": engine.state, "use": told(lambda: ids(engine, 1))}
        engine.start_sync()
        return {**found, "restarted": ids(engine, 1)}

    door = Door()
    engine = Engine("fake", loader=Loader(door.wait))
    engine.start_soon()

    def child_opens() -> Seen:
        door.open()
        return child(engine)

    seen["starting"] = in_child(child_opens)
    door.open()
    ids(engine)
    fake = FakeExecutor(num_kv_blocks=64, vocab_size=256)
    gate = Gate(fake)
    draining = toy_engine(fake)
    handle = draining.submit_sync(prompt_token_ids=PROMPT, params=tokens(3))
    gate.held_sync(1)
    stop = threading.Thread(target=draining.stop_sync)
    stop.start()
    while draining.state != "draining":
        time.sleep(0.001)

    def child_of_draining() -> Seen:
        gate.open()
        return child(draining)

    seen["draining"] = in_child(child_of_draining)
    gate.open()
    seen["drained"] = len(read(handle))
    stop.join()
    engine.stop_sync()
    seen["stopped"] = in_child(lambda: child(engine))
    return seen


def blocks() -> Seen:
    """A `with` block that both sides leave, one of the child's own in it, and a second fork."""
    engine = toy_engine()

    def grandchild() -> Seen:
        return {"state": engine.state, "use": told(lambda: ids(engine))}

    def child() -> Seen:
        with engine:
            states = [engine.state]
            ids(engine)
            below = in_child(grandchild)
            states.append(engine.state)
        engine.__exit__()  # the parent's block, which the child leaves as well
        return {"states": [*states, engine.state], "below": below}

    with engine:
        seen = in_child(child)
        seen["parent"] = [engine.state, ids(engine)]
    seen["left"] = engine.state
    return seen


def processes() -> Seen:
    """`multiprocessing` with its fork method."""
    engine = toy_engine()
    engine.start_sync()
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()

    def work() -> None:
        refused = told(lambda: ids(engine))
        with engine:
            answers.put([refused, ids(engine)])

    worker = context.Process(target=work)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        worker.start()
    refused, answer = answers.get()
    worker.join()
    seen = {"refused": refused, "ids": answer, "exit": worker.exitcode, "parent": ids(engine)}
    engine.stop_sync()
    return seen


def tiny() -> Seen:
    """The bundled model, with torch and two threads used before the fork."""
    engine = Engine("tiny", EngineConfig(num_threads=2))
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)

    def answer() -> str:
        return engine.generate_sync(prompt="Once upon a time " * 20, params=params).text

    engine.start_sync()
    before = answer()

    def child() -> Seen:
        refused = told(answer)
        engine.start_sync()
        return {"refused": refused, "same": answer() == before}

    seen = in_child(child)
    seen["parent"] = answer() == before
    engine.stop_sync()
    return seen


SCENES = (started, locks, constructed, unfinished, blocks, processes, tiny)

if __name__ == "__main__":
    [scene] = [scene for scene in SCENES if scene.__name__ == sys.argv[1]]
    result = scene()
    json.dump(result, sys.stdout)
