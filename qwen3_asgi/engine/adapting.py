"""What callers do with LoRA adapters: the methods of `Engine` for them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, TypeVar

from qwen3_asgi.engine.offload import ThreadLimit
from qwen3_asgi.engine.portal import check_thread, wait_future
from qwen3_asgi.errors import EngineDead

if TYPE_CHECKING:
    from collections.abc import Sequence
    from concurrent.futures import Future

    from qwen3_asgi.engine.adapter_files import PathLike
    from qwen3_asgi.engine.adapters import AdapterInfo
    from qwen3_asgi.engine.lifecycle import Lifecycle, Runtime

T = TypeVar("T")
# One at a time: an adapter may be large, and its bytes are in memory twice while it is read.
_reading = ThreadLimit("qwen3_asgi_adapters", 1)


class AdapterMethods(ABC):
    """Adapters belong to the started engine: a stop forgets them all."""

    _lifecycle: Lifecycle

    @abstractmethod
    def _runtime(self) -> Future[Runtime]:
        """Starts the engine if it is new."""

    @abstractmethod
    def _running(self) -> Runtime:
        """Raises: EngineNotReady, EngineDead."""

    def adapters(self) -> tuple[AdapterInfo, ...]:
        """The adapters that requests can name now. Takes no lock."""
        runtime = self._lifecycle.runtime
        return () if runtime is None else runtime.adapters.infos

    async def load_adapter(
        self, name: str, path: PathLike, *, within: Sequence[PathLike] | None = None
    ) -> AdapterInfo:
        """Load a PEFT LoRA adapter, under traffic, and return when requests can name it.

        Starts the engine if it is new. An adapter of the same name is replaced once the requests
        that use it have ended; later ones wait for the new one. Giving up waiting takes nothing
        back.

        Args:
            name: what requests call it.
            path: a folder with `adapter_config.json` and `adapter_model.safetensors`.
            within: if the path is not your own: only files below these folders are opened.

        Raises:
            InvalidRequest: no adapter for this model, a name that can't be, or too many of them.
            ModelLoadError: there was no memory for it; one of the same name is still there.
            EngineNotReady, EngineDead: as `submit`.
        """
        runtime = await wait_future(self._runtime())
        adapter = await _reading.run(runtime.adapters.read, name, path, within)
        try:
            return await wait_future(runtime.adapters.load(adapter))
        except EngineDead as error:
            raise self._ended(error) from None

    def load_adapter_sync(
        self, name: str, path: PathLike, *, within: Sequence[PathLike] | None = None
    ) -> AdapterInfo:
        """`load_adapter` for threads."""
        check_thread()
        runtime = self._runtime().result()
        adapter = runtime.adapters.read(name, path, within)
        try:
            return runtime.adapters.load(adapter).result()
        except EngineDead as error:
            raise self._ended(error) from None

    async def unload_adapter(self, name: str) -> None:
        """Forget an adapter; returns when the last request that uses it has ended.

        New requests for it are refused from the call on. Giving up waiting takes nothing back.

        Raises:
            InvalidRequest: there is none (code `model_not_found`).
            EngineNotReady, EngineDead: as `submit`.
        """
        runtime = self._running()
        try:
            await wait_future(runtime.adapters.unload(name))
        except EngineDead as error:
            raise self._ended(error) from None

    def unload_adapter_sync(self, name: str) -> None:
        """`unload_adapter` for threads."""
        check_thread()
        runtime = self._running()
        try:
            runtime.adapters.unload(name).result()
        except EngineDead as error:
            raise self._ended(error) from None

    def _ended(self, error: EngineDead) -> Exception:
        """What a caller is told whose command a scheduler that has ended did not take."""
        stopped = self._lifecycle.state in ("draining", "stopped")
        return self._lifecycle.refusal() if stopped else error
