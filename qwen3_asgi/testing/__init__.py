"""For tests of apps that mount the engine: a fake model that needs no torch, and real transports.

from qwen3_asgi.testing import DisconnectingASGITransport, assert_idle, fake_engine

As pytest fixtures: `pytest_plugins = ["qwen3_asgi.testing.fixtures"]`.
"""

from __future__ import annotations

from qwen3_asgi.testing.checks import assert_idle, assert_idle_async, assert_no_leaks
from qwen3_asgi.testing.engine import FakeModels, fake_engine, use_fake_models
from qwen3_asgi.testing.fake_executor import FakeExecutor, RowCall, next_token
from qwen3_asgi.testing.gate import StepGate
from qwen3_asgi.testing.lifespan import lifespan
from qwen3_asgi.testing.transport import DisconnectingASGITransport, DisconnectingClient, HungUp
from qwen3_asgi.testing.websocket import WebSocketClosed, WebSocketSession

__all__ = [
    "DisconnectingASGITransport",
    "DisconnectingClient",
    "FakeExecutor",
    "FakeModels",
    "HungUp",
    "RowCall",
    "StepGate",
    "WebSocketClosed",
    "WebSocketSession",
    "assert_idle",
    "assert_idle_async",
    "assert_no_leaks",
    "fake_engine",
    "lifespan",
    "next_token",
    "use_fake_models",
]
