"""Shared by all tests: the event loops of async tests, and what to do without torch."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

from tests.hosts.server import serve_model

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.hosts.server import Server

TESTS = Path(__file__).parent
NO_TORCH = find_spec("torch") is None or find_spec("transformers") is None
# Whole folders and files; single tests have the mark `torch`.
NEED_TORCH = [
    TESTS / "conformance",
    TESTS / "model",
    TESTS / "promises" / "test_ctrl_c.py",
    TESTS / "promises" / "test_disconnect_storm.py",
    TESTS / "promises" / "test_engine_burst.py",
    TESTS / "promises" / "test_tiny_answers.py",
    TESTS / "test_docs.py",
    TESTS / "test_examples.py",
    TESTS / "text" / "test_against_transformers.py",
    TESTS / "tiny" / "test_folder.py",
    TESTS / "tiny" / "test_template.py",
]

# Triton reads this when it is imported, which other packages may do at any time: the kernels of
# `model/cuda` are run by its interpreter where there is no driver to run them.
if not Path("/proc/driver/nvidia").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# A property is about results, not about time: a busy machine is no failure.
settings.register_profile("whole suite", deadline=None)
settings.load_profile("whole suite")


@pytest.fixture(
    params=[
        pytest.param("asyncio", id="asyncio"),
        pytest.param(
            ("asyncio", {"use_uvloop": True}),
            id="asyncio+uvloop",
            marks=pytest.mark.skipif(find_spec("uvloop") is None, reason="uvloop is not there"),
        ),
        pytest.param("trio", id="trio"),
    ]
)
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    """The event loop of an async test marked with `anyio`; `anyio_backend_name` is its kind."""
    return request.param


@pytest.fixture(scope="session")
def tiny_server() -> Iterator[Server]:
    """`qwen3-asgi serve tiny`, shared by the tests that leave it idle."""
    if NO_TORCH:
        pytest.skip("needs torch and transformers")
    with serve_model("tiny") as server:
        yield server


class _NeedsTorch(pytest.Module):
    """A file that is not even imported."""

    def collect(self) -> list[Any]:
        pytest.skip("needs torch and transformers", allow_module_level=True)


def pytest_pycollect_makemodule(
    module_path: Path, parent: pytest.Collector
) -> pytest.Module | None:
    needs = any(module_path == path or path in module_path.parents for path in NEED_TORCH)
    return _NeedsTorch.from_parent(parent, path=module_path) if NO_TORCH and needs else None


def pytest_runtest_setup(item: pytest.Item) -> None:
    if NO_TORCH and item.get_closest_marker("torch") is not None:
        pytest.skip("needs torch and transformers")
