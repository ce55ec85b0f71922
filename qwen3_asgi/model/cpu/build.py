"""The C++ sources in, a loaded library out: compiled once per machine, then read from a cache.

The library has a plain C interface and needs no headers of torch, so it compiles in seconds. It
shares torch's own OpenMP runtime: a second one would keep a second set of threads that wait in a
busy loop on the same cores.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

SOURCES = Path(__file__).parent / "src"
COMPILERS = ("g++", "clang++", "c++")
FLAGS = (
    *("-std=c++17", "-O3", "-march=native", "-fPIC", "-fopenmp", "-fvisibility=hidden"),
    # Products and sums are fused everywhere, so that a row's result does not depend on which of
    # several copies of a loop has computed it; nothing else is reordered.
    *("-ffp-contract=fast", "-fno-math-errno"),
)
BUILD_SECONDS = 300.0
_MAX_MESSAGE_CHARS = 300


class BuildError(Exception):
    """There is no library, and why."""


def cache_folder() -> Path:
    """Where compiled libraries are kept: a folder that nobody else may write to.

    Raises:
        BuildError: there is none.
    """
    try:
        folder = Path.home() / ".cache" / "qwen3_asgi"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except (OSError, RuntimeError) as error:
        raise BuildError(f"no folder to keep them in: {error}") from error
    # What lies here is run: whoever can write to it can run code as this user.
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise BuildError(f"{folder} can be written to by others")
    return folder


def load_library(folder: Path) -> ctypes.CDLL:
    """Load the kernels from `folder`, compiling them first if they are not there.

    Raises:
        BuildError: they cannot be compiled or loaded.
    """
    library = folder / f"kernels-{fingerprint()}.so"
    if not library.exists():
        _compile(library)
    try:
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise BuildError(f"{library} cannot be loaded: {error}") from error


def fingerprint() -> str:
    """A name for what these sources compile to on this machine, with this torch."""
    digest = hashlib.sha256()
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    for part in (*FLAGS, torch.__version__, str(_openmp()), platform.machine(), _cpu_flags()):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:32]


def _compile(library: Path) -> None:
    compiler = next((found for name in COMPILERS if (found := shutil.which(name))), None)
    if compiler is None:
        raise BuildError(f"no C++ compiler ({', '.join(COMPILERS)})")
    openmp = _openmp()
    if openmp is None:
        raise BuildError("torch's OpenMP library was not found")
    try:
        with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
            compiled, linked = Path(scratch, "kernels.o"), Path(scratch, "kernels.so")
            source = SOURCES / "kernels.cpp"
            _run(compiler, *FLAGS, "-c", str(source), "-o", str(compiled))
            # Without -fopenmp: that would name the compiler's own runtime.
            _run(compiler, "-shared", str(compiled), str(openmp), "-lm", "-o", str(linked))
            # In one move, since other processes may be about to load it.
            linked.replace(library)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{compiler}: {error}") from error


def _run(*command: str) -> None:
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=BUILD_SECONDS, check=False
    )
    if done.returncode:
        lines = done.stderr.splitlines()
        said = next((line for line in lines if "error" in line), " ".join(lines[:1]))
        raise BuildError(f"{command[0]} failed: {said[:_MAX_MESSAGE_CHARS]}")


def _openmp() -> Path | None:
    """The OpenMP library that torch has loaded into this process."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return None
    found = {line.split(maxsplit=5)[5] for line in lines if re.search(r"/lib[gi]?omp[-\d.]", line)}
    inside = Path(torch.__file__).parent
    ours = sorted(found, key=lambda path: (not path.startswith(str(inside)), path))
    return Path(ours[0]) if ours else None


def _cpu_flags() -> str:
    """What `-march=native` goes by: model and instruction sets."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    wanted = ("model", "model name", "flags", "Features", "CPU part")
    seen: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() in wanted:
            seen.setdefault(name.strip(), " ".join(sorted(value.split())))
    return repr(sorted(seen.items()))
