"""Every server, every way to leave: what it costs, and that docs/servers.md says so.

Real processes on loopback, one for each server; its cells run one after the other on it.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

import pytest

from tests.hosts.matrix.cells import MOUNTED, Cell, body, cells
from tests.hosts.matrix.host import COLUMNS, PLACES, Column, Hosts, Place
from tests.hosts.matrix.limits import LIMITS, UNTOLD, check, key, tells
from tests.hosts.matrix.table import Results, committed, render, without_times

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.hosts.matrix.host import Host


class Case(NamedTuple):
    """One cell; without one, what surrounds the cells of a column."""

    column: Column
    what: str
    place: Place | None = None
    cell: Cell | None = None


START, CTRL_C = "start", "Ctrl-C"
ALL = [(place, cell) for place in PLACES for cell in cells(http2=place.http2)]
# In the order of the columns, so that each server is started once.
CASES = [
    case
    for column in COLUMNS
    for case in (
        Case(column, START),
        *(
            Case(column, f"{place.name} {cell.name}", place, cell)
            for place, cell in ALL
            if place.column is column
        ),
        Case(column, CTRL_C),
    )
]
# A live stream for longer than any server waits for it.
LONG = body("long", stream=True, max_tokens=3000)

_ERROR = re.compile(r"^[ |]*([\w.]*(?:Error|Exception|Group|Interrupt|Cancelled)\w*)(?::|$)", re.M)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    hosts = Hosts(tmp_path_factory.mktemp("certificate"))
    yield hosts
    hosts.close()


@pytest.fixture(scope="module")
def results() -> Results:
    return {}


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.column.name}: {case.what}")
def test_a_gone_client_costs_one_step_at_most(hosts: Hosts, results: Results, case: Case) -> None:
    try:
        if case.place is not None and case.cell is not None:
            host = hosts.host(case.column, http2=case.place.http2)
            try:
                seen = case.cell.run(host, tells(case.place, case.cell))
            finally:
                host.close_connections()
            results[case.place, case.cell.name] = seen
            check(case.place, case.cell, seen)
        elif case.what == START:
            check_start(hosts.host(case.column), case.column)
        else:
            check_ctrl_c(hosts, case.column)
            hosts.close()
    except BaseException:
        hosts.close()  # the next one shall not find this one's leftovers
        raise


def check_start(host: Host, column: Column) -> None:
    """The engine starts with the host's lifespan, or on first use where there is none."""
    state = host.state()
    has_lifespan = column.kind != "daphne"
    assert state["lifespan"] is has_lifespan
    assert state["engine"] == ("ready" if has_lifespan else "new")
    asked = {"model": "fake", "prompt": "x", "max_tokens": 2}
    assert host.server.post(MOUNTED, asked).status_code == 200
    assert host.state()["engine"] == "ready"


def check_ctrl_c(hosts: Hosts, column: Column) -> None:
    """It ends by itself with streams live, and what it logs is its own cancellation of them."""
    live = [hosts.host(column, http2=http2) for http2 in {False, column.http2 and not column.tls}]
    for host in live:
        connection = host.connect()
        connection.read_until(b"data: ", connection.request(MOUNTED, LONG))
    server = live[0].server
    assert server.load()["num_running"] == len(live)
    before = server.log
    try:
        log = server.stop()
    finally:
        for host in live:
            host.close_connections()
    assert server.process.returncode == 0, log
    assert raised_by_us(log.removeprefix(before)) <= {"CancelledError"}, log


def raised_by_us(log: str) -> set[str]:
    """The names of the exceptions whose tracebacks have frames of the package."""
    return {
        found[1].rpartition(".")[2]
        for block in log.split("Traceback (most recent call last):")[1:]
        if "qwen3_asgi" in block and (found := _ERROR.search(block))
    }


def test_the_tables_of_the_docs_say_what_was_seen(results: Results) -> None:
    missing = {(place, cell.name) for place, cell in ALL} - results.keys()
    if missing:
        pytest.skip(f"{len(missing)} cells were not run, or failed")
    seen = without_times(render(results))
    assert without_times(committed()) == seen, "run python -m tests.hosts.matrix.write"


def test_every_limit_belongs_to_a_cell() -> None:
    known = {key(place, cell.row) for place, cell in ALL}
    assert set(LIMITS) <= known
    assert known >= UNTOLD
    assert not UNTOLD & set(LIMITS)


BEGIN = "Traceback (most recent call last):\n"
OURS, THEIRS = '  File "x/qwen3_asgi/a.py"\n', '  File "x/uvicorn/a.py"\n'


@pytest.mark.parametrize(
    ("log", "errors"),
    [
        (f"{BEGIN}{OURS}ValueError: x\n", {"ValueError"}),
        (f"{BEGIN}{THEIRS}ValueError: x\n", set()),
        (f"{BEGIN}{THEIRS}OSError\n{BEGIN} | {OURS} | a.b.CancelledError\n", {"CancelledError"}),
    ],
)
def test_the_reader_of_tracebacks_reads(log: str, errors: set[str]) -> None:
    assert raised_by_us(log) == errors
