"""Fixtures for the scheduler's tests."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def quiet() -> Iterator[None]:
    """For tests that inject failures by the thousand: formatting their tracebacks takes longest."""
    logging.disable()
    yield
    logging.disable(logging.NOTSET)
