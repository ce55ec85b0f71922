"""The LoRA adapters of one started engine: which there are, and the commands that change it.

Reading happens on a caller's thread; what changes the model is a command to the scheduler.
"""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from qwen3_asgi.engine.adapter_files import AdapterFolder
from qwen3_asgi.errors import InvalidRequest, ModelLoadError, Qwen3Error
from qwen3_asgi.scheduler.control import load_adapter, unload_adapter

if TYPE_CHECKING:
    from collections.abc import Sequence

    from qwen3_asgi.engine.adapter_files import PathLike
    from qwen3_asgi.engine.loading import AdapterReader
    from qwen3_asgi.scheduler.loop import Scheduler

MAX_NAME_CHARS = 128


class AdapterInfo(NamedTuple):
    """An adapter that requests can name. `fingerprint` is a digest of its files."""

    name: str
    path: str
    rank: int
    fingerprint: str


class NewAdapter(NamedTuple):
    """What was read of an adapter's files; `weights` are the executor's."""

    info: AdapterInfo
    weights: object


class Adapters:
    """Every method may be called from any thread. None but `read` blocks.

    Args:
        base: the name of the model itself, which no adapter may have.
        limit: most adapters at a time.
    """

    def __init__(
        self, scheduler: Scheduler, reader: AdapterReader | None, *, base: str, limit: int
    ) -> None:
        self._scheduler = scheduler
        self._reader = reader
        self._base = base
        self._limit = limit
        # Re-entrant: a scheduler that has ended refuses a command while we are handing it over.
        self._lock = threading.RLock()
        # Below: changed under `_lock`. `_infos` is replaced whole, and read without it.
        self._infos: dict[str, AdapterInfo] = {}
        self._coming: Counter[str] = Counter()
        self._commands = 0
        self._unloads: dict[str, int] = {}  # name -> number of the last command that unloads it

    @property
    def infos(self) -> tuple[AdapterInfo, ...]:
        return tuple(self._infos.values())

    def check(self, name: str) -> None:
        """
        Raises:
            InvalidRequest: there is no adapter of this name (code `model_not_found`).
        """
        if name not in self._infos:
            raise _unknown(name, "model")

    def read(self, name: str, path: PathLike, within: Sequence[PathLike] | None) -> NewAdapter:
        """Read an adapter's files. Takes as long as that takes: not for an event loop.

        Raises:
            InvalidRequest: it may not have this name, or is no adapter for this model.
        """
        self._check_new(name)
        if self._reader is None:
            raise InvalidRequest("this model takes no adapters", param="lora_name")
        folder = AdapterFolder(path, within)
        weights, rank, fingerprint = self._reader(folder.read)
        return NewAdapter(AdapterInfo(name, str(path), rank, fingerprint), weights)

    def load(self, adapter: NewAdapter) -> Future[AdapterInfo]:
        """Let the scheduler install it; it replaces one of the same name once nobody uses that.

        Raises:
            InvalidRequest: there are too many.
            EngineDead: the scheduler has ended.
        """
        info = adapter.info
        loaded: Future[AdapterInfo] = Future()
        done: Future[None] = Future()
        with self._lock:
            self._check_new(info.name)
            number = self._next()
            self._coming[info.name] += 1
            done.add_done_callback(partial(self._loaded, info, number, loaded))
            self._scheduler.control(
                load_adapter(info.name, adapter.weights, info.fingerprint, done)
            )
        return loaded

    def unload(self, name: str) -> Future[None]:
        """Refuse new requests for it, and let the scheduler forget it once nobody uses it.

        Raises:
            InvalidRequest: there is none (code `model_not_found`).
            EngineDead: the scheduler has ended.
        """
        done: Future[None] = Future()
        with self._lock:
            if name not in self._infos:
                raise _unknown(name, "lora_name")
            self._infos = {key: info for key, info in self._infos.items() if key != name}
            self._unloads[name] = self._next()
            self._scheduler.control(unload_adapter(name, done))
        return done

    def _loaded(
        self, info: AdapterInfo, number: int, loaded: Future[AdapterInfo], done: Future[None]
    ) -> None:
        """On the scheduler thread: the command was carried out, or refused."""
        error = done.exception()
        with self._lock:
            self._coming -= Counter([info.name])
            # One that is to be unloaded again stays hidden.
            if error is None and number > self._unloads.get(info.name, 0):
                self._infos = {**self._infos, info.name: info}
        if error is None:
            loaded.set_result(info)
        elif isinstance(error, Qwen3Error):
            loaded.set_exception(error)
        else:  # of torch, mostly: no memory
            reason = f"adapter {info.name!r} could not be loaded: {type(error).__name__}: {error}"
            loaded.set_exception(ModelLoadError(reason))

    def _check_new(self, name: str) -> None:
        if not 0 < len(name) <= MAX_NAME_CHARS or not name.isprintable() or name != name.strip():
            raise InvalidRequest(
                f"an adapter's name must have 1 to {MAX_NAME_CHARS} printable characters, and no "
                f"space at its ends",
                param="lora_name",
            )
        if name == self._base:
            raise InvalidRequest(f"{name!r} is the model itself", param="lora_name")
        known = {*self._infos, *self._coming}
        if name not in known and len(known) >= self._limit:
            raise InvalidRequest(
                f"there are {len(known)} adapters; more are not allowed",
                param="lora_name",
                code="too_many_adapters",
            )

    def _next(self) -> int:
        self._commands += 1
        return self._commands


def _unknown(name: str, param: str) -> InvalidRequest:
    return InvalidRequest(
        f"there is no adapter {name[:MAX_NAME_CHARS]!r}", param=param, code="model_not_found"
    )
