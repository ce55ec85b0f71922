"""For tests of apps that mount the engine: a fake model that needs no torch, and a real transport.

from qwen3_asgi.testing import DisconnectingASGITransport, FakeExecutor, fake_engine
"""

from __future__ import annotations

from qwen3_asgi.testing.engine import assert_idle, fake_engine
from qwen3_asgi.testing.fake_executor import FakeExecutor, RowCall, next_token
from qwen3_asgi.testing.transport import DisconnectingASGITransport

__all__ = [
    "DisconnectingASGITransport",
    "FakeExecutor",
    "RowCall",
    "assert_idle",
    "fake_engine",
    "next_token",
]
