"""`Engine`: one model, one scheduler thread, for every loop, thread and mount of the process."""

from __future__ import annotations

import time
import uuid
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar, Unpack

import anyio
import anyio.to_thread
from anyio.lowlevel import RunVar

from qwen3_asgi.config import EngineConfig, SamplingParams
from qwen3_asgi.engine.binding import current_binding
from qwen3_asgi.engine.handle import RequestHandle
from qwen3_asgi.engine.intake import Ask, Asked, Messages, make_request
from qwen3_asgi.engine.lifecycle import EngineState, Lifecycle, Runtime
from qwen3_asgi.engine.loading import LoadedModel, Loader, load_model, served_name
from qwen3_asgi.engine.mailbox import Mailbox
from qwen3_asgi.engine.outbox import Outbox, ThreadOutbox
from qwen3_asgi.engine.output import Collector, GenerationOutput
from qwen3_asgi.engine.portal import in_event_loop, wait_future
from qwen3_asgi.engine.process import (
    follow_forks,
    next_label,
    replaced_loading,
    shared_engine,
)
from qwen3_asgi.engine.stream import DeltaStream
from qwen3_asgi.errors import EngineDead, EngineNotReady, EngineOverloaded
from qwen3_asgi.metrics.recorder import EngineMetrics
from qwen3_asgi.scheduler.load import LoadSnapshot
from qwen3_asgi.scheduler.request import check_fits

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence
    from concurrent.futures import Future

    from prometheus_client import CollectorRegistry

    from qwen3_asgi.text.tokenizer import Tokenizer

T = TypeVar("T")
DRAIN_SECONDS = 30.0
# Threads per event loop for tokenising; not the loop's default threads, which the host's own
# blocking endpoints may have taken, waiting for the very tokens that we would start.
OFFLOAD_THREADS = 4
_offload_limiter: RunVar[anyio.CapacityLimiter] = RunVar("qwen3_asgi_offload")


class Engine:
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

        Raises:
            InvalidRequest: wrong arguments; ContextLengthExceeded if it can never fit.
            EngineOverloaded: the queue is full.
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
        )
        arrival = time.monotonic()
        runtime = await wait_future(self._runtime())
        token_ids = await self.offload(ask.encode, runtime.model.tokenizer)
        return self._enqueue(runtime, ask, token_ids, arrival, runtime.delivery.outbox_here())

    def submit_sync(self, **asked: Unpack[Asked]) -> RequestHandle:
        """`submit` for threads; read the handle with `read_sync`.

        Raises:
            RuntimeError: called on an event loop, which it would block.
        """
        if in_event_loop():
            raise RuntimeError("this would block the event loop; await the async method instead")
        ask = Ask(**asked)
        arrival = time.monotonic()
        runtime = self._runtime().result()
        token_ids = ask.encode(runtime.model.tokenizer)
        return self._enqueue(runtime, ask, token_ids, arrival, ThreadOutbox())

    def stream(self, **asked: Unpack[Asked]) -> DeltaStream:
        """Deltas as tokens come: `async for delta in engine.stream(...)`.

        Leaving it in any way cancels the request. Raises: as `submit`, and as reading a handle.
        """
        return DeltaStream(lambda: self.submit(**asked), lambda: self._collector(asked))

    async def generate(self, **asked: Unpack[Asked]) -> GenerationOutput:
        """Generate to the end. Cancelling the caller cancels the request.

        Raises: as `submit`, and as reading a `RequestHandle`.
        """
        handle = await self.submit(**asked)
        try:
            collector = self._collector(asked)
            async for batch in handle:
                collector.add(batch)
            return _whole(collector, handle)
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
            return _whole(collector, handle)
        finally:
            handle.cancel()

    async def offload(self, function: Callable[..., T], *args: Any) -> T:
        """Run a short blocking function in a thread of the engine's own."""
        try:
            limiter = _offload_limiter.get()
        except LookupError:
            limiter = anyio.CapacityLimiter(OFFLOAD_THREADS)
            _offload_limiter.set(limiter)
        return await anyio.to_thread.run_sync(function, *args, limiter=limiter)

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
        """From here to the handle nothing awaits, so a request can't be left without an owner."""
        if self.state != "ready" or self._lifecycle.runtime is not runtime:
            raise self._lifecycle.refusal()
        params = ask.sampling_params
        check_fits(len(token_ids), params.max_tokens, runtime.scheduler.limits, param=ask.param)
        binding = current_binding.get()
        if binding is not None:
            binding.check()
        delivery = runtime.delivery
        if len(delivery) >= self.config.max_queue + self.config.max_batch:
            raise EngineOverloaded(
                f"{len(delivery)} requests are live; the queue takes {self.config.max_queue}"
            )
        request = make_request(
            uuid.uuid4().hex,
            token_ids,
            params,
            runtime.model,
            cache_salt=ask.cache_salt,
            arrival=arrival,
        )
        mailbox = Mailbox(
            request.id, outbox, runtime.scheduler.cancel, self._metrics.on_client_disconnect
        )
        delivery.register(mailbox)
        try:
            runtime.scheduler.submit(request)
        except BaseException as error:
            delivery.forget(mailbox)
            if isinstance(error, EngineDead) and self.state in ("draining", "stopped"):
                raise self._lifecycle.refusal() from None
            raise
        handle = RequestHandle(mailbox, token_ids, binding)
        if binding is not None:
            binding.bind(mailbox)
        return handle


def _whole(collector: Collector, handle: RequestHandle) -> GenerationOutput:
    if handle.finish is None:  # unreachable: reading ends with a finish or raises
        raise EngineDead("the token stream ended without a terminal event")
    return collector.output(handle, handle.finish)
