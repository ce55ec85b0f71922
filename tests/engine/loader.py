"""A loader of fake models that counts its calls, and waits or fails on demand."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from qwen3_asgi.engine.loading import LoadedModel, SamplingDefaults
from tests.engine.engines import GUARD_SECONDS, executor
from tests.text.toy import toy_tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable

    from qwen3_asgi.config import EngineConfig


class Loader:
    """Counts its calls, and waits or fails on demand."""

    def __init__(self, before: Callable[[], None] | None = None) -> None:
        self.calls = 0
        self.before = before
        self.loaded: list[LoadedModel] = []

    def __call__(self, name: str, config: EngineConfig) -> LoadedModel:
        self.calls += 1
        if self.before is not None:
            self.before()
        model = LoadedModel(executor(), toy_tokenizer(), (), SamplingDefaults(temperature=0.0))
        self.loaded.append(model)
        return model


class Door:
    """Holds loads until it is opened: `Loader(door.wait)`."""

    def __init__(self) -> None:
        self._opened = threading.Event()
        self.open = self._opened.set

    def wait(self) -> None:
        self._opened.wait(GUARD_SECONDS)
