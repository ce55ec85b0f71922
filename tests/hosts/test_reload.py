"""`uvicorn --reload`: the edited app answers with a new engine; nothing is left of the old one."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import psutil

from tests.hosts.server import read_until, wait_until
from tests.hosts.workers import SECONDS, Workers, serve_workers, text_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager
    from pathlib import Path

APP = """
from tests.hosts.apps.worker_host import build, engine_of_files

app = build(engine_of_files(), lifespan=True, version="{version}")
"""


def edit(folder: Path, version: str) -> None:
    (folder / "edited" / "edited_app.py").write_text(APP.format(version=version))


def reloading(folder: Path) -> AbstractContextManager[Workers]:
    (folder / "edited").mkdir()
    edit(folder, "1")
    where = str(folder / "edited")
    return serve_workers(
        "",
        folder,
        "uvicorn",
        app="edited_app:app",
        num_workers=1,
        options=["--reload", "--reload-dir", where, "--app-dir", where],
    )


def zombies(workers: Workers) -> Iterator[psutil.Process]:
    return (p for p in workers.processes() if p.status() == psutil.STATUS_ZOMBIE)


def test_the_edited_app_answers_and_the_old_process_is_gone(tmp_path: Path) -> None:
    with reloading(tmp_path) as workers:
        first = workers.where()
        assert (first["version"], first["state"]) == ("1", "ready")
        assert workers.completion().json()["usage"]["completion_tokens"] == 3
        count = len(workers.processes())
        pids = [first["pid"]]
        for version in ("2", "3"):
            edit(tmp_path, version)
            wait_until(lambda v=version: workers.where()["version"] == v, "the edit", SECONDS)
            now = workers.where()
            assert now["state"] == "ready"
            assert now["pid"] not in pids
            assert workers.completion().json()["usage"]["completion_tokens"] == 3
            pids.append(now["pid"])
        assert [pid for pid in pids[:-1] if psutil.pid_exists(pid)] == []
        assert len(workers.processes()) == count
        assert list(zombies(workers)) == []
        workers.stop(signal.SIGINT)


def test_a_stream_that_is_live_at_a_reload_is_finished_first(tmp_path: Path) -> None:
    with reloading(tmp_path) as workers:
        workers.hold()
        connection = workers.begin(max_tokens=40)
        read_until(connection, b"200 OK")
        old = workers.where()
        edit(tmp_path, "2")
        wait_until(lambda: "Reloading" in workers.server.log, "the edit was noticed", SECONDS)
        wait_until(lambda: "Shutting down" in workers.server.log, "the old one ends", SECONDS)
        assert psutil.pid_exists(old["pid"])
        workers.release()
        assert text_of(connection)
        wait_until(lambda: workers.where()["version"] == "2", "the edited app", SECONDS)
        assert not psutil.pid_exists(old["pid"])
        workers.stop(signal.SIGINT)
