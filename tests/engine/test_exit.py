"""A program that starts an engine and never stops it ends by itself, with status 0 and no word."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# The patience at exit is far above the time limit of the test, unless a script lowers it: what ends
# in time has not run into it.
PROLOGUE = """
import atexit, threading, time
from qwen3_asgi.engine import lifecycle
from qwen3_asgi import Engine, SamplingParams
from tests.engine.engines import LONG, Gate, executor, tokens, toy_engine
from tests.engine.loader import Door, Loader

lifecycle.EXIT_SECONDS = 10.0**6
"""
SCRIPTS = {
    "idle": """
engine = toy_engine()
engine.start_sync()
assert len(engine.generate_sync(prompt="x", params=tokens(3)).token_ids) == 3
""",
    "live generations that nobody reads": """
fake = executor()
gate = Gate(fake)
engine = toy_engine(fake)
handles = [engine.submit_sync(prompt="x", params=LONG) for _ in range(8)]
gate.held_sync(1)
gate.open()
""",
    "a daemon thread in the middle of a generation": """
fake = executor()
gate = Gate(fake)
engine = toy_engine(fake)
thread = threading.Thread(
    target=lambda: engine.generate_sync(prompt="x", params=LONG), daemon=True
)
atexit.register(thread.join, 0.5)  # after the engine's hook: time to say something, if it did
thread.start()
gate.held_sync(1)
gate.open()
""",
    "a model that is being loaded": """
engine = Engine("toy", loader=Loader(lambda: time.sleep(0.2)))
engine.start_soon()
""",
    "a daemon thread that waits for the model": """
engine = Engine("toy", loader=Loader(lambda: time.sleep(0.2)))
threading.Thread(target=lambda: engine.generate_sync(prompt="x"), daemon=True).start()
while engine.state == "new":
    time.sleep(0.001)
""",
    "a model that loads for ever": """
lifecycle.EXIT_SECONDS = 0.2
engine = Engine("toy", loader=Loader(lambda: time.sleep(10**6)))
engine.start_soon()
""",
    "a step that takes for ever": """
lifecycle.EXIT_SECONDS = 0.2
fake = executor()
fake.before_step = lambda plan: time.sleep(10**6)
engine = toy_engine(fake)
handle = engine.submit_sync(prompt="x", params=LONG)
while fake.plans == 0:
    time.sleep(0.001)
""",
    "an engine that was stopped, and one that could not be loaded": """
engine = toy_engine()
engine.start_sync()
engine.stop_sync()
def fail():
    raise OSError("no such file")
broken = Engine("toy", loader=Loader(fail))
broken.start_soon()
while broken.state != "new":
    time.sleep(0.001)
""",
    "the bundled model in the middle of an answer": """
engine = Engine("tiny")
handle = engine.submit_sync(prompt="Once", params=SamplingParams(max_tokens=1500, ignore_eos=True))
next(iter(handle.read_sync()))
""",
    "the bundled model being loaded": """
Engine("tiny").start_soon()
""",
}


@pytest.mark.parametrize(
    "what",
    [
        pytest.param(what, marks=pytest.mark.torch if "bundled model" in what else ())
        for what in SCRIPTS
    ],
)
def test_a_program_that_never_stops_its_engine_ends_by_itself(what: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROLOGUE + SCRIPTS[what]],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
