"""A Qwen3 inference engine inside your ASGI app.

The public names are imported on first use: `import qwen3_asgi` loads neither torch nor
transformers and has no side effect.
"""

from __future__ import annotations

import logging
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from qwen3_asgi.app import create_app
    from qwen3_asgi.config import EngineConfig, SamplingParams
    from qwen3_asgi.engine.adapters import AdapterInfo
    from qwen3_asgi.engine.engine import Engine
    from qwen3_asgi.engine.handle import RequestHandle, TokenBatch
    from qwen3_asgi.engine.output import Delta, GenerationOutput
    from qwen3_asgi.engine.stream import DeltaStream
    from qwen3_asgi.errors import (
        ClientDisconnected,
        ContextLengthExceeded,
        EngineDead,
        EngineNotReady,
        EngineOverloaded,
        GenerationCancelled,
        GenerationFailed,
        GenerationTimeout,
        InvalidRequest,
        ModelLoadError,
        Qwen3Error,
    )
    from qwen3_asgi.middleware import DisconnectMiddleware
    from qwen3_asgi.scheduler.load import LoadSnapshot

__version__ = "0.1.0"

# What is logged goes where the host sends it, and nowhere if it sends it nowhere.
logging.getLogger(__name__).addHandler(logging.NullHandler())

_HOME = {
    "AdapterInfo": "engine.adapters",
    "ClientDisconnected": "errors",
    "ContextLengthExceeded": "errors",
    "Delta": "engine.output",
    "DeltaStream": "engine.stream",
    "DisconnectMiddleware": "middleware",
    "Engine": "engine.engine",
    "EngineConfig": "config",
    "EngineDead": "errors",
    "EngineNotReady": "errors",
    "EngineOverloaded": "errors",
    "GenerationCancelled": "errors",
    "GenerationFailed": "errors",
    "GenerationOutput": "engine.output",
    "GenerationTimeout": "errors",
    "InvalidRequest": "errors",
    "LoadSnapshot": "scheduler.load",
    "ModelLoadError": "errors",
    "Qwen3Error": "errors",
    "RequestHandle": "engine.handle",
    "SamplingParams": "config",
    "TokenBatch": "engine.handle",
    "create_app": "app",
}

__all__ = [
    "AdapterInfo",
    "ClientDisconnected",
    "ContextLengthExceeded",
    "Delta",
    "DeltaStream",
    "DisconnectMiddleware",
    "Engine",
    "EngineConfig",
    "EngineDead",
    "EngineNotReady",
    "EngineOverloaded",
    "GenerationCancelled",
    "GenerationFailed",
    "GenerationOutput",
    "GenerationTimeout",
    "InvalidRequest",
    "LoadSnapshot",
    "ModelLoadError",
    "Qwen3Error",
    "RequestHandle",
    "SamplingParams",
    "TokenBatch",
    "__version__",
    "create_app",
]


def __getattr__(name: str) -> object:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
