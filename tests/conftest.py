"""Shared by all tests: async tests run on asyncio and on trio."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.hosts.server import serve_model

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.hosts.server import Server


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """The event loop of an async test marked with `anyio`."""
    return str(request.param)


@pytest.fixture(scope="session")
def tiny_server() -> Iterator[Server]:
    """`qwen3-asgi serve tiny`, shared by the tests that leave it idle."""
    with serve_model("tiny") as server:
        yield server
