"""Shared by all tests: async tests run on asyncio and on trio."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.serving import serve

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.serving import Served


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """The event loop of an async test marked with `anyio`."""
    return str(request.param)


@pytest.fixture(scope="session")
def tiny_server() -> Iterator[Served]:
    """`qwen3-asgi serve tiny`, shared by the tests that leave it idle."""
    with serve("tiny", "--log-level", "warning") as served:
        yield served
