"""CPU time and memory of processes on this machine, read from Linux's /proc."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

PROC = Path("/proc")
# Of `tcp` and `tcp6`: the state of a socket that listens.
LISTENS = "0A"


def cpu_seconds(pid: int) -> float:
    """CPU time that a process and all its descendants have used so far, the waited-for included.

    Raises:
        ValueError: there is no such process, or no /proc.
    """
    fields = _stats()
    if pid not in fields:
        raise ValueError(f"no process {pid} can be seen in {PROC}")
    children: dict[int, list[int]] = {}
    for each, (parent, _) in fields.items():
        children.setdefault(parent, []).append(each)
    ticks, left = 0, [pid]
    while left:
        each = left.pop()
        ticks += fields[each][1]
        left += children.get(each, [])
    return ticks / os.sysconf("SC_CLK_TCK")


def _stats() -> dict[int, tuple[int, int]]:
    """Parent and clock ticks of every process."""
    found = {}
    for folder in PROC.glob("[0-9]*"):
        try:
            # The name in brackets may hold anything, a bracket too.
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it ended meanwhile
            continue
        found[int(folder.name)] = int(fields[1]), sum(map(int, fields[11:15]))
    return found


def listener_pid(port: int) -> int:
    """The process that listens on a TCP port of this machine; the first of several.

    Raises:
        ValueError: nobody does, as far as can be seen.
    """
    inodes = {
        f"socket:[{fields[9]}]"
        for name in ("tcp", "tcp6")
        if (PROC / "net" / name).exists()
        for fields in map(str.split, (PROC / "net" / name).read_text().splitlines()[1:])
        if fields[3] == LISTENS and int(fields[1].rpartition(":")[2], 16) == port
    }
    for pid in sorted(int(folder.name) for folder in PROC.glob("[0-9]*")):
        if not inodes.isdisjoint(_links(PROC / str(pid) / "fd")):
            return pid
    raise ValueError(f"no process is seen that listens on port {port}: give its pid")


def _links(folder: Path) -> Iterator[str]:
    """Where the links point; one that is gone meanwhile, or is somebody else's, is left out."""
    with suppress(OSError):
        for link in folder.iterdir():
            with suppress(OSError):
                yield os.readlink(link)


def memory_bytes() -> tuple[int, int]:
    """What this process has in memory, and the most that it had so far.

    Raises:
        ValueError: there is no /proc.
    """
    try:
        lines = (PROC / "self" / "status").read_text().splitlines()
    except OSError as error:
        raise ValueError(f"memory is read from {PROC}, which is not there: {error}") from error
    fields = {name: value for name, _, value in (line.partition(":") for line in lines)}
    rss, most = (int(fields[name].split()[0]) * 1024 for name in ("VmRSS", "VmHWM"))
    return rss, most
