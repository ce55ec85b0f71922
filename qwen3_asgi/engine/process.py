"""What belongs to the process, not to an engine: the shared engines, unique engine labels, and what
a fork does to engines.

The only module-level state of the package, since "one engine per process and model" is a statement
about the process.
"""

from __future__ import annotations

import itertools
import os
import threading
from typing import TYPE_CHECKING
from weakref import WeakSet

from qwen3_asgi.metrics import families

if TYPE_CHECKING:
    from collections.abc import Callable

    from qwen3_asgi.config import EngineConfig
    from qwen3_asgi.engine.engine import Engine
    from qwen3_asgi.engine.loading import LoadedModel

    Replacement = Callable[[Engine], LoadedModel]

_labels = itertools.count()
_lock = threading.RLock()  # making a shared engine takes it twice
_shared: dict[tuple[str, EngineConfig], Engine] = {}
_engines: WeakSet[Engine] = WeakSet()
_follows_forks = False
_replacement: Replacement | None = None


def next_label() -> str:
    """The `engine` label of the next engine's metrics: "0", "1", …"""
    return str(next(_labels))


def follow_forks(engine: Engine) -> None:
    """Tell this engine from now on when it finds itself in the child of a fork."""
    global _follows_forks
    with _lock:
        _engines.add(engine)
        # With the first engine, not with the import; a hook can't be taken back.
        if not _follows_forks and hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=_after_fork)
        _follows_forks = True


def _after_fork() -> None:
    global _lock
    _lock = threading.RLock()  # another thread may have held it, and does not exist here
    families.after_fork()
    for engine in list(_engines):
        engine.after_fork()


def engines() -> list[Engine]:
    """Every engine that somebody still refers to."""
    return list(_engines)


def replaced_loading() -> Replacement | None:
    """What loads models instead of `load_model`; for tests, see `testing.use_fake_models`."""
    return _replacement


def replace_loading(replacement: Replacement | None) -> Replacement | None:
    """Set it for every engine that starts from now on; returns what it was before."""
    global _replacement
    before, _replacement = _replacement, replacement
    return before


def shared_engine(model: str, config: EngineConfig, make: Callable[[], Engine]) -> Engine:
    """The process's one engine for this model and configuration."""
    with _lock:
        engine = _shared.get((model, config))
        if engine is None:
            engine = _shared[model, config] = make()
        return engine
