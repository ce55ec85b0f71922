"""A server that runs no lifespan, or a host that has none: the engine starts on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.hosts.matrix.cells import MOUNTED
from tests.hosts.matrix.host import APP
from tests.hosts.server import serve

if TYPE_CHECKING:
    from tests.hosts.server import ServerKind


@pytest.mark.parametrize(
    ("server", "make", "switched_on"),
    [
        ("uvicorn", "make", False),
        ("granian", "make", False),
        ("uvicorn", "make_without_lifespan", True),
        ("hypercorn-asyncio", "make_without_lifespan", True),
        ("hypercorn-trio", "make_without_lifespan", True),
        ("granian", "make_without_lifespan", True),
    ],
    ids=lambda it: {True: "on", False: "off"}.get(it, it),
)
def test_the_engine_starts_on_first_use_and_ends_with_the_server(
    server: ServerKind, make: str, switched_on: bool
) -> None:
    with serve(f"{APP}:{make}", server=server, factory=True, lifespan=switched_on) as running:
        state = running.get("/stage/state").json()
        assert (state["lifespan"], state["engine"]) == (False, "new")
        asked = {"model": "fake", "prompt": "x", "max_tokens": 2}
        assert running.post(MOUNTED, asked).status_code == 200
        assert running.get("/stage/state").json()["engine"] == "ready"
        before = running.log
        log = running.stop()
        assert running.process.returncode == 0, log
        assert "Traceback" not in log.removeprefix(before), log
