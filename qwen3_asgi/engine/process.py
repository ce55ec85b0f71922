"""What belongs to the process, not to an engine: the shared engines, and unique engine labels.

The only module-level state of the package, since "one engine per process and model" is a statement
about the process.
"""

from __future__ import annotations

import itertools
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from qwen3_asgi.config import EngineConfig
    from qwen3_asgi.engine.engine import Engine

_labels = itertools.count()
_lock = threading.Lock()
_shared: dict[tuple[str, EngineConfig], Engine] = {}


def next_label() -> str:
    """The `engine` label of the next engine's metrics: "0", "1", …"""
    return str(next(_labels))


def shared_engine(model: str, config: EngineConfig, make: Callable[[], Engine]) -> Engine:
    """The process's one engine for this model and configuration."""
    with _lock:
        engine = _shared.get((model, config))
        if engine is None:
            engine = _shared[model, config] = make()
        return engine
