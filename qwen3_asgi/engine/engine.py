"""`Engine`: one model, one scheduler thread, for every loop, thread and mount of the process."""

from __future__ import annotations

import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar, Unpack

import anyio

from qwen3_asgi.config import EngineConfig, SamplingParams
from qwen3_asgi.engine.adapting import AdapterMethods
from qwen3_asgi.engine.binding import current_binding
from qwen3_asgi.engine.intake import Ask, Asked, Messages
from qwen3_asgi.engine.lifecycle import EngineState, Lifecycle, Runtime
from qwen3_asgi.engine.loading import LoadedModel, Loader, load_model, served_name
from qwen3_asgi.engine.offload import ThreadLimit
from qwen3_asgi.engine.outbox import Outbox, ThreadOutbox
from qwen3_asgi.engine.output import Collector, GenerationOutput
from qwen3_asgi.engine.portal import check_thread, wait_future
from qwen3_asgi.engine.process import (
    follow_forks,
    next_label,
    replaced_loading,
    shared_engine,
)
from qwen3_asgi.engine.stream import DeltaStream
from qwen3_asgi.engine.submission import (
    check_choices,
    seconds_allowed,
    submit,
    within,
    within_sync,
)
from qwen3_asgi.errors import EngineDead, EngineNotReady, GenerationTimeout
from qwen3_asgi.metrics.recorder import EngineMetrics
from qwen3_asgi.scheduler.load import LoadSnapshot

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence
    from concurrent.futures import Future

    from prometheus_client import CollectorRegistry

    from qwen3_asgi.engine.handle import RequestHandle
    from qwen3_asgi.scheduler.trace import SchedulerTrace
    from qwen3_asgi.text.tokenizer import Tokenizer

T = TypeVar("T")
DRAIN_SECONDS = 30.0
# Per event loop, for tokenising.
OFFLOAD_THREADS = 4
_offload = ThreadLimit("qwen3_asgi_offload", OFFLOAD_THREADS)


class Engine(AdapterMethods):
    """A Qwen3 model behind one scheduler thread. Building it starts and loads nothing.

    Args:
        model: "tiny" (bundled), a local Hugging Face folder, or a hub id.
        config: sizes and device.
        loader: replaces how the model is loaded; for tests.
    """

    def __init__(
        self, model: str, config: EngineConfig | None = None, *, loader: Loader | None = None
    ) -> None:
        self.model = model
        self.config = config or EngineConfig()
        self.model_name = served_name(model, self.config)
        self._metrics = EngineMetrics(self.model_name, next_label())
        load = loader or self._load_model
        self._lifecycle = Lifecycle(
            self.model_name, self.config, lambda: load(self.model, self.config), self._metrics
        )
        follow_forks(self)

    @classmethod
    def shared(cls, model: str, config: EngineConfig | None = None) -> Engine:
        """The process's one engine for this model and configuration; the same object every call."""
        settings = config or EngineConfig()
        return shared_engine(model, settings, lambda: cls(model, settings))

    # ---- start and stop ----

    @property
    def state(self) -> EngineState:
        return self._lifecycle.state

    @property
    def tokenizer(self) -> Tokenizer:
        """
        Raises:
            EngineNotReady: the engine is not started.
        """
        return self._running().model.tokenizer

    async def start(self) -> None:
        """Load the model and start the scheduler thread. Idempotent; concurrent calls share it.

        Raises:
            ModelLoadError: the model cannot be used.
            EngineNotReady: the engine is stopping.
        """
        await wait_future(self._lifecycle.launch())

    def start_sync(self) -> None:
        """`start` for threads."""
        self._lifecycle.launch().result()

    def renew(self) -> None:
        """Let the first use start the engine again although it was stopped or has died."""
        self._lifecycle.renew()

    def start_soon(self) -> None:
        """Begin the start on first use without waiting for it; from any thread or loop.

        Raises:
            EngineNotReady, EngineDead: the engine is stopping, stopped or dead.
        """
        self._lifecycle.launch(lazily=True)

    async def stop(self, *, drain: float = DRAIN_SECONDS) -> None:
        """Refuse new requests, give the live ones `drain` seconds, then end them and the thread.

        Stops at once for everybody, whoever is still inside a `with` block or a lifespan.
        """
        if (stopping := self._lifecycle.begin_stop()) is not None:
            await stopping.finish(drain)

    def stop_sync(self, *, drain: float = DRAIN_SECONDS) -> None:
        """`stop` for threads."""
        if (stopping := self._lifecycle.begin_stop()) is not None:
            stopping.finish_sync(drain)

    async def restart(self, *, drain: float = DRAIN_SECONDS) -> None:
        """`stop` if it runs, then `start`: out of every state, also a dead engine.

        Whoever is inside a `with` block or a lifespan stays inside. Requests that come meanwhile
        are refused with `EngineNotReady`, and while it starts they wait as for the first start.

        Raises: as `start`.
        """
        await self.stop(drain=drain)
        await self.start()

    def restart_sync(self, *, drain: float = DRAIN_SECONDS) -> None:
        """`restart` for threads."""
        self.stop_sync(drain=drain)
        self.start_sync()

    def after_fork(self) -> None:
        """In the child of a fork, called by the process: what was started there did not come along.

        An engine that was never started is as new; any other refuses until it is started again.
        """
        touched = self.state != "new"
        self._lifecycle.after_fork()
        if touched:
            self._metrics.after_fork()

    @asynccontextmanager
    async def lifespan(self, app: object = None) -> AsyncIterator[None]:
        """A lifespan for Starlette and FastAPI: `FastAPI(lifespan=engine.lifespan)`.

        Several apps may have it, nested or not, on any event loops: the first one starts the
        engine, the last one out stops it. The same holds for `with` and `async with`.
        """
        del app
        async with self:
            yield

    async def __aenter__(self) -> Engine:
        with self._lifecycle.entering():
            while (ending := self._lifecycle.ending) is not None:
                await wait_future(ending)
            await self.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        if (stopping := self._lifecycle.leave()) is not None:
            with anyio.CancelScope(shield=True):
                await stopping.finish(DRAIN_SECONDS)

    def __enter__(self) -> Engine:
        with self._lifecycle.entering():
            while (ending := self._lifecycle.ending) is not None:
                ending.result()
            self.start_sync()
        return self

    def __exit__(self, *exc_info: object) -> None:
        if (stopping := self._lifecycle.leave()) is not None:
            stopping.finish_sync(DRAIN_SECONDS)

    # ---- generation ----

    async def submit(
        self,
        *,
        prompt: str | None = None,
        messages: Messages | None = None,
        prompt_token_ids: Sequence[int] | None = None,
        params: SamplingParams | None = None,
        tools: Sequence[Any] | None = None,
        enable_thinking: bool = True,
        cache_salt: str = "",
        adapter: str | None = None,
        timeout: float | None = None,  # noqa: ASYNC109 (a deadline in the scheduler)
        priority: int = 0,
    ) -> RequestHandle:
        """Queue one generation and return its handle; read it on this event loop.

        Starts the engine if it is new.

        Args:
            prompt, messages, prompt_token_ids: what to continue; exactly one of them. `messages`
                are OpenAI's, rendered by the model's chat template.
            params: how to sample; the model's defaults when None.
            tools: OpenAI's tool definitions, for the chat template.
            enable_thinking: whether the chat template lets the model think first.
            cache_salt: prefix-cache blocks are shared only between requests with the same salt.
            adapter: name of a LoRA adapter to run with; None is the model itself.
            timeout: seconds from this call to the last token; then it ends by `GenerationTimeout`.
            priority: the lower, the sooner admitted and the later preempted; arrival decides ties.

        Raises:
            InvalidRequest: wrong arguments; ContextLengthExceeded if it can never fit.
            EngineOverloaded: the queue is full.
            GenerationTimeout: the time was up before the engine had started.
            EngineNotReady, EngineDead: the engine is stopping, stopped or dead, or is starting and
                `EngineConfig.cold_start` is "refuse".
            ClientDisconnected: the client of the bound HTTP request has gone already.
        """
        ask = Ask(
            prompt=prompt,
            messages=messages,
            prompt_token_ids=prompt_token_ids,
            params=params,
            tools=tools,
            enable_thinking=enable_thinking,
            cache_salt=cache_salt,
            adapter=adapter,
            timeout=timeout,
            priority=priority,
        )
        arrival = time.monotonic()
        check_choices(ask.sampling_params.n, self.config)
        try:
            runtime = await within(seconds_allowed(ask, self.config), self._runtime())
        except GenerationTimeout:
            self._metrics.on_timeout()
            raise
        token_ids = await self.offload(ask.encode, runtime.model.tokenizer)
        return self._enqueue(runtime, ask, token_ids, arrival, runtime.delivery.outbox_here())

    def submit_sync(self, **asked: Unpack[Asked]) -> RequestHandle:
        """`submit` for threads; read the handle with `read_sync`.

        Raises:
            RuntimeError: called on an event loop, which it would block.
        """
        check_thread()
        ask = Ask(**asked)
        arrival = time.monotonic()
        check_choices(ask.sampling_params.n, self.config)
        try:
            runtime = within_sync(seconds_allowed(ask, self.config), self._runtime())
        except GenerationTimeout:
            self._metrics.on_timeout()
            raise
        token_ids = ask.encode(runtime.model.tokenizer)
        return self._enqueue(runtime, ask, token_ids, arrival, ThreadOutbox())

    def stream(self, **asked: Unpack[Asked]) -> DeltaStream:
        """Deltas as tokens come: `async for delta in engine.stream(...)`.

        Leaving it in any way cancels the request. Raises: as `submit`, and as reading a handle.
        """
        return DeltaStream(lambda: self.submit(**asked), lambda: self._collector(asked))

    async def generate(self, **asked: Unpack[Asked]) -> GenerationOutput:
        """Generate to the end. Cancelling the caller cancels the request.

        With `SamplingParams(n=…)` the result is the first output, and its `outputs` are all of
        them.

        Raises: as `submit`, and as reading a `RequestHandle`.
        """
        handle = await self.submit(**asked)
        try:
            collector = self._collector(asked)
            async for batch in handle:
                collector.add(batch)
            return collector.output(handle.request_id)
        finally:
            handle.cancel()

    def generate_sync(self, **asked: Unpack[Asked]) -> GenerationOutput:
        """`generate` for threads: FastAPI `def` endpoints, Django sync views.

        Raises: as `submit_sync`, and as reading a `RequestHandle`.
        """
        handle = self.submit_sync(**asked)
        try:
            collector = self._collector(asked)
            for batch in handle.read_sync():
                collector.add(batch)
            return collector.output(handle.request_id)
        finally:
            handle.cancel()

    async def offload(self, function: Callable[..., T], *args: Any) -> T:
        """Run a short blocking function in a thread of the engine's own."""
        return await _offload.run(function, *args)

    # ---- what it tells the world ----

    def load(self) -> LoadSnapshot:
        """The scheduler's load as last published. Takes no lock; 0/0 when nothing runs."""
        runtime = self._lifecycle.runtime
        return LoadSnapshot() if runtime is None else runtime.scheduler.load

    @property
    def live_requests(self) -> int:
        """Requests without their terminal event, also those that `load()` does not show yet."""
        runtime = self._lifecycle.runtime
        return 0 if runtime is None else len(runtime.delivery)

    def metrics(self, registry: CollectorRegistry | None = None) -> None:
        """Show this engine in a Prometheus registry (default: the default one). Idempotent."""
        if registry is None:
            from prometheus_client import REGISTRY

            registry = REGISTRY
        self._metrics.attach(registry)

    @property
    def stalled_seconds(self) -> float | None:
        """How long a step has been running that takes more than `step_warn_seconds`; else None."""
        runtime = self._lifecycle.runtime
        return None if runtime is None else runtime.watchdog.stalled_seconds

    @property
    def trace(self) -> SchedulerTrace | None:
        """The record of the scheduler's last iterations, with `EngineConfig.trace_iterations`."""
        return self._lifecycle.trace

    def refusal(self) -> EngineDead | EngineNotReady | None:
        """Why a generation sent now would not be taken at once; None if it would."""
        state = self.state
        return None if state == "ready" else self._lifecycle.refusal(state)

    # ---- inside ----

    def _load_model(self, name: str, config: EngineConfig) -> LoadedModel:
        replacement = replaced_loading()
        return load_model(name, config) if replacement is None else replacement(self)

    def _running(self) -> Runtime:
        runtime = self._lifecycle.runtime
        if runtime is None:
            raise self._lifecycle.refusal()
        return runtime

    def _runtime(self) -> Future[Runtime]:
        """Starts the engine if it is new. A client that goes is not kept waiting for that, and
        nothing is generated for it."""
        started = self._lifecycle.use()
        binding = current_binding.get()
        return started if binding is None else binding.unless_gone(started)

    def _collector(self, asked: Asked) -> Collector:
        return Collector(self.tokenizer, asked.get("params") or SamplingParams())

    def _enqueue(
        self,
        runtime: Runtime,
        ask: Ask,
        token_ids: list[int],
        arrival: float,
        outbox: Outbox,
    ) -> RequestHandle:
        if self.state != "ready" or self._lifecycle.runtime is not runtime:
            raise self._lifecycle.refusal()
        try:
            return submit(runtime, ask, token_ids, arrival, outbox, self.config, self._metrics)
        except EngineDead:
            if self.state in ("draining", "stopped"):
                raise self._lifecycle.refusal() from None
            raise
