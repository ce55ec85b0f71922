"""Servers that fork their workers, before or after they have imported the app."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import psutil
import pytest

from tests.hosts.server import wait_until
from tests.hosts.workers import SECONDS, serve_workers, text_of

if TYPE_CHECKING:
    from pathlib import Path

    from tests.hosts.server import ServerKind

PRELOAD = ["--preload"]


@pytest.mark.parametrize("make", ["make", "make_lazy"])
@pytest.mark.parametrize("options", [[], PRELOAD], ids=["", "preload"])
@pytest.mark.parametrize("server", ["gunicorn", "gunicorn-asgi"])
def test_an_engine_built_at_import_works_in_each_worker(
    make: str, options: list[str], server: ServerKind, tmp_path: Path
) -> None:
    with serve_workers(make, tmp_path, server, options=options) as workers:
        before = workers.all_of(2)
        assert {found["state"] for found in before.values()} == {
            "ready" if make == "make" else "new"
        }

        def both_have_generated() -> bool:
            assert workers.completion().json()["usage"]["completion_tokens"] == 3
            return {found["state"] for found in workers.all_of(2).values()} == {"ready"}

        wait_until(both_have_generated, "a generation in each worker", SECONDS)
        workers.stop()


def test_an_engine_started_before_the_fork_is_refused_in_every_worker_with_the_reason(
    tmp_path: Path,
) -> None:
    with serve_workers("make_started", tmp_path, "gunicorn", options=PRELOAD) as workers:
        assert {found["state"] for found in workers.all_of(2).values()} == {"dead"}
        refused = workers.completion()
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "10")
        error = refused.json()["error"]
        assert error["code"] == "engine_dead"
        assert error["message"].startswith("the engine was started before this process was forked")
        for path in ("/llm/health", "/llm/ready"):
            assert workers.server.get(path).status_code == 503
        assert workers.live_by_metrics() == 0
        workers.stop()  # the master stops the engine that it has started for nobody


def test_the_lifespan_starts_an_engine_anew_that_was_started_before_the_fork(
    tmp_path: Path,
) -> None:
    make = "make_started_with_lifespan"
    with serve_workers(make, tmp_path, "gunicorn", options=PRELOAD) as workers:
        assert {found["state"] for found in workers.all_of(2).values()} == {"ready"}
        assert workers.completion().json()["usage"]["completion_tokens"] == 3
        workers.stop()


@pytest.mark.parametrize("options", [[], PRELOAD], ids=["", "preload"])
def test_the_gauges_of_the_workers_add_up_and_those_of_a_dead_one_vanish(
    options: list[str], tmp_path: Path
) -> None:
    with serve_workers("make", tmp_path, "gunicorn", options=options) as workers:
        workers.hold()
        live = workers.both_busy()
        assert workers.live_by_metrics() == sum(live.values())
        victim, other = live
        psutil.Process(victim).send_signal(signal.SIGKILL)
        wait_until(lambda: workers.live_by_metrics() == live[other], "only the other's", SECONDS)
        new = workers.all_of(2)
        assert victim not in new
        assert workers.live_by_metrics() == live[other]
        workers.release()
        wait_until(lambda: workers.live_by_metrics() == 0, "0 in all workers", SECONDS)
        assert workers.server.metric("vllm:generation_tokens_total") > 0
        workers.stop()


def test_uvicorn_workers_have_an_engine_each_and_their_gauges_add_up(tmp_path: Path) -> None:
    with serve_workers("make", tmp_path, "uvicorn") as workers:
        workers.hold()
        live = workers.both_busy()
        assert workers.live_by_metrics() == sum(live.values()) == 2
        workers.release()
        texts = {text_of(connection) for connection in workers.open}
        assert len(texts) == 1  # each engine says the same
        workers.stop(signal.SIGINT)
