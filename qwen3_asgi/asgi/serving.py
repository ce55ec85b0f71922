"""What the routes need of an engine, as protocols: tests put a scripted engine in its place."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping, Sequence

    from prometheus_client import CollectorRegistry

    from qwen3_asgi.config import SamplingParams
    from qwen3_asgi.engine.adapters import AdapterInfo
    from qwen3_asgi.engine.handle import TokenBatch
    from qwen3_asgi.errors import EngineDead, EngineNotReady
    from qwen3_asgi.scheduler.load import LoadSnapshot
    from qwen3_asgi.text.tokenizer import Tokenizer

T = TypeVar("T")
PathLike = str | os.PathLike[str]


class Handle(Protocol):
    """The engine's `RequestHandle`."""

    @property
    def prompt_token_ids(self) -> Sequence[int]: ...
    def __aiter__(self) -> AsyncIterator[TokenBatch]: ...
    def cancel(self) -> None: ...


class ServingEngine(Protocol):
    """The part of `Engine` that HTTP uses."""

    @property
    def model_name(self) -> str: ...
    @property
    def state(self) -> str: ...
    @property
    def tokenizer(self) -> Tokenizer: ...
    async def offload(self, fn: Callable[..., T], /, *args: Any) -> T: ...
    async def submit(
        self,
        *,
        prompt: str | None = None,
        messages: Sequence[Mapping[str, Any]] | None = None,
        prompt_token_ids: Sequence[int] | None = None,
        params: SamplingParams | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        enable_thinking: bool = True,
        cache_salt: str = "",
        adapter: str | None = None,
        timeout: float | None = None,  # noqa: ASYNC109 (a deadline in the scheduler)
        priority: int = 0,
    ) -> Handle: ...
    def adapters(self) -> Sequence[AdapterInfo]: ...
    async def load_adapter(
        self, name: str, path: PathLike, *, within: Sequence[PathLike] | None = None
    ) -> AdapterInfo: ...
    async def unload_adapter(self, name: str) -> None: ...
    def start_soon(self) -> None: ...
    @property
    def stalled_seconds(self) -> float | None: ...
    def refusal(self) -> EngineDead | EngineNotReady | None: ...
    def load(self) -> LoadSnapshot: ...
    def metrics(self, registry: CollectorRegistry | None = None) -> None: ...
