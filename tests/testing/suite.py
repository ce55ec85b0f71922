"""Runs pytest on a few modules of tests, in a process of its own, as in a host's repository."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]


class Outcome(NamedTuple):
    passed: int
    failed: int
    errors: int
    output: str


def run(folder: Path, blocks: list[str], conftest: str) -> Outcome:
    (folder / "conftest.py").write_text(conftest)
    for number, block in enumerate(blocks):
        (folder / f"test_{number}.py").write_text(block)
    command = [sys.executable, "-m", "pytest", "-q", "-W", "error", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "--rootdir", str(folder), str(folder)],
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "DJANGO_SETTINGS_MODULE": "examples.django_app.settings",
        },
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    counted = {word: int(n) for n, word in re.findall(r"(\d+) (passed|failed|error)", done.stdout)}
    counts = [counted.get(word, 0) for word in ("passed", "failed", "error")]
    return Outcome(*counts, done.stdout + done.stderr)
