"""`python -m tests.hosts.matrix.write [times]`: run the matrix and write docs/servers.md's tables.

The milliseconds are medians over the runs, three of them if not said otherwise.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import median

from tests.hosts.matrix.cells import Seen, cells
from tests.hosts.matrix.host import PLACES, Hosts, Place
from tests.hosts.matrix.limits import check, tells
from tests.hosts.matrix.table import write


def main(times: int = 3) -> None:
    seen: dict[tuple[Place, str], list[Seen]] = {}
    with tempfile.TemporaryDirectory() as folder:
        hosts = Hosts(Path(folder))
        try:
            for place in PLACES * times:
                for cell in cells(http2=place.http2):
                    host = hosts.host(place.column, http2=place.http2)
                    found = cell.run(host, tells(place, cell))
                    host.close_connections()
                    check(place, cell, found)
                    seen.setdefault((place, cell.name), []).append(found)
        finally:
            hosts.close()
    write({key: _median(runs) for key, runs in seen.items()})


def _median(runs: list[Seen]) -> Seen:
    times = [run.milliseconds for run in runs if run.milliseconds is not None]
    return replace(runs[0], milliseconds=median(times) if times else None)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
