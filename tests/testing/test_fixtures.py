"""`qwen3_asgi.testing.fixtures` in a host's pytest: what they give, and what they hold tests to."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.testing.suite import run

if TYPE_CHECKING:
    from pathlib import Path

CONFTEST = 'pytest_plugins = ["qwen3_asgi.testing.fixtures"]\n'
GOOD = """
import asyncio
import threading

import pytest
from qwen3_asgi import Engine, SamplingParams

engine = Engine("Qwen/Qwen3-4B")

def test_the_engine_is_started(qwen3_engine):
    assert qwen3_engine.state == "ready"
    assert qwen3_engine.generate_sync(prompt="x", params=SamplingParams(max_tokens=3)).text

@pytest.mark.parametrize("round", [1, 2])
def test_without_a_plugin_for_async_tests(round, fake_models, disconnecting_client):
    fake_models.replies = {"x": str(round)}

    async def use():
        async with disconnecting_client(None):
            return (await engine.generate(prompt="x")).text

    assert asyncio.run(use()) == str(round)

def test_nothing_was_left_by_the_tests_before(qwen3_engine):
    names = [t.name for t in threading.enumerate() if t.name.startswith("qwen3-asgi")]
    assert sorted(names) == ["qwen3-asgi fake", "qwen3-asgi fake watchdog"]
    assert engine.state == "new"
"""
BAD = """
from qwen3_asgi import SamplingParams

left = []

def test_it_leaves_a_request(qwen3_engine):
    params = SamplingParams(max_tokens=3000, ignore_eos=True)
    left.append(qwen3_engine.submit_sync(prompt="x", params=params))
"""
SLOW = """
import time
import pytest
from qwen3_asgi.testing import StepGate

class Slow(StepGate):
    def enter(self, plan):
        time.sleep(0.05)  # 3000 of them take longer than the check waits

@pytest.fixture
def step_gate():
    return Slow()
"""


def test_they_serve_one_test_after_the_other(tmp_path: Path) -> None:
    outcome = run(tmp_path, [GOOD], CONFTEST)
    assert (outcome.passed, outcome.failed, outcome.errors) == (4, 0, 0), outcome.output


def test_a_test_that_leaves_a_request_is_an_error(tmp_path: Path) -> None:
    outcome = run(tmp_path, [BAD], CONFTEST + SLOW)
    assert (outcome.passed, outcome.failed, outcome.errors) == (1, 0, 1), outcome.output
    assert "1 live requests" in outcome.output
