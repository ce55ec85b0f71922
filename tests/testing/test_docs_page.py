"""The tests that docs/testing.md shows, run by pytest itself as a host's developer would."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from tests.testing.suite import ROOT, run

if TYPE_CHECKING:
    from pathlib import Path

PAGE = (ROOT / "docs" / "testing.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python(?: fragment)?\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
CONFTEST, FIRST = BLOCKS[0], BLOCKS[1]
# So that the test that must fail does so soon.
SHORT_GUARD = """
import pytest
from qwen3_asgi.testing import StepGate

@pytest.fixture
def step_gate():
    return StepGate(guard_seconds=0.2)
"""


def test_every_test_on_the_page_passes(tmp_path: Path) -> None:
    tests = [block for block in BLOCKS if "def test_" in block]
    outcome = run(tmp_path, tests, CONFTEST)
    on_asyncio_only = sum('["asyncio"]' in block for block in tests)
    assert (outcome.passed, outcome.failed) == (2 * len(tests) - on_asyncio_only, 0), outcome.output
    assert len(tests) >= 8


def test_the_first_of_them_has_fifteen_lines_and_fails_without_the_middleware(
    tmp_path: Path,
) -> None:
    assert sum(bool(line.strip()) for line in FIRST.splitlines()) <= 15
    broken = FIRST.replace("\n@pytest", "\napp.user_middleware.clear()\n\n@pytest", 1)
    assert broken != FIRST
    outcome = run(tmp_path, [broken], CONFTEST + SHORT_GUARD)
    assert (outcome.passed, outcome.failed) == (0, 2), outcome.output
    assert "a step was held for 0.2 s" in outcome.output
