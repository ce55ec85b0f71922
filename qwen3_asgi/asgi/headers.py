"""Reads a request header from the scope, as bytes and without building a map of all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starlette.types import Scope


def header(scope: Scope, name: bytes) -> bytes | None:
    """The first header of this lower-case name."""
    for key, value in scope["headers"]:
        if key.lower() == name:
            return bytes(value)
    return None
