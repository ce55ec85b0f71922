"""Reads an adapter's files: each whole and once, up to a limit, none outside of what is allowed.

A path may come from a request, so it is judged by its text before anything is looked up, and the
files are opened in a way that a link put in place meanwhile can't lead astray.
"""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

from qwen3_asgi.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Sequence

PathLike = str | os.PathLike[str]
MAX_PATH_CHARS = 4096
# Where the system has no such flags the checks before have to do. A pipe must not block the opener.
_FLAGS = (
    os.O_RDONLY
    | getattr(os, "O_CLOEXEC", 0)
    | getattr(os, "O_NONBLOCK", 0)
    | getattr(os, "O_BINARY", 0)
)
_NO_LINK = getattr(os, "O_NOFOLLOW", 0)
_STEPWISE = os.open in os.supports_dir_fd


class AdapterFolder:
    """The files of one folder.

    Args:
        path: the folder; with `within`, it may be relative to one of these.
        within: only files below one of these folders are opened, wherever links lead. None: any.

    Raises:
        InvalidRequest: it is no folder, or outside of `within`.
    """

    def __init__(self, path: PathLike, within: Sequence[PathLike] | None = None) -> None:
        given = os.fspath(path)
        if not 0 < len(given) <= MAX_PATH_CHARS or "\0" in given or not _can_be_a_path(given):
            raise refused(f"the path must have 1 to {MAX_PATH_CHARS} characters")
        self._root: str | None = None
        if within is None:
            self._folder = os.path.abspath(given)
        else:
            self._root, self._folder = _place(given, within)
        if not os.path.isdir(self._folder):
            raise refused("there is no such folder")

    def read(self, name: str, max_bytes: int) -> bytes:
        """The content of one file.

        Raises:
            InvalidRequest: it is missing, too large, no plain file, or a link that leads outside.
        """
        try:
            descriptor = self._open(name)
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                os.close(descriptor)
                raise refused(f"{name} is no file")
            with open(descriptor, "rb") as file:
                data = file.read(max_bytes + 1)
        except FileNotFoundError:
            raise refused(f"{name} is missing") from None
        except OSError as error:
            raise refused(f"{name} cannot be read: {error.strerror}") from error
        if len(data) > max_bytes:
            raise refused(f"{name} is larger than {max_bytes} bytes")
        return data

    def _open(self, name: str) -> int:
        path = os.path.join(self._folder, name)
        if self._root is None:
            return os.open(path, _FLAGS)
        real = os.path.realpath(path)
        parts = _below(real, self._root)
        if not parts:
            raise _outside(name)
        if not _STEPWISE:
            return os.open(real, _FLAGS)
        # Without links from here on: one that appears now was put there to get past the check.
        at = os.open(self._root, _FLAGS)
        for number, part in enumerate(parts):
            last = number == len(parts) - 1
            try:
                inner = os.open(
                    part, _FLAGS | _NO_LINK | (0 if last else os.O_DIRECTORY), dir_fd=at
                )
            finally:
                os.close(at)
            at = inner
        return at


def _can_be_a_path(text: str) -> bool:
    try:
        os.fsencode(text)
    except UnicodeEncodeError:
        return False
    return True


def _place(given: str, within: Sequence[PathLike]) -> tuple[str, str]:
    """The allowed folder that a path is in, and the path itself, both without links."""
    if os.pardir in given.replace("\\", "/").split("/"):
        raise refused("the path must not have '..' in it")
    found = False
    for folder in within:
        root = os.path.realpath(folder)
        for spelling in (os.path.abspath(folder), root):
            path = os.path.normpath(os.path.join(spelling, given))
            if _below(path, spelling) is None:
                continue
            found = True
            real = os.path.realpath(path)
            if _below(real, root) is None:
                raise _outside("the folder")
            if os.path.isdir(real):
                return root, real
    raise refused("there is no such folder") if found else _outside("the folder")


def _below(path: str, root: str) -> list[str] | None:
    """The steps from `root` down to `path`; None if it is elsewhere."""
    try:
        if os.path.commonpath([path, root]) != root:
            return None
    except ValueError:  # on another drive
        return None
    relative = os.path.relpath(path, root)
    return [] if relative == os.curdir else relative.split(os.sep)


def refused(message: str) -> InvalidRequest:
    return InvalidRequest(message, param="lora_path", code="invalid_adapter")


def _outside(what: str) -> InvalidRequest:
    return refused(f"{what} is not inside of a folder that adapters may be loaded from")
