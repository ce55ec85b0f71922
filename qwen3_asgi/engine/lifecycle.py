"""Start, run and end of the scheduler thread: the states of an engine and who may change them.

The thread loads the model itself, so that one thread alone ever touches the device.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
import time
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import anyio

from qwen3_asgi.engine.adapters import Adapters
from qwen3_asgi.engine.delivery import Delivery
from qwen3_asgi.engine.loading import startup
from qwen3_asgi.engine.portal import wait_future
from qwen3_asgi.engine.watchdog import Watchdog
from qwen3_asgi.errors import EngineDead, EngineNotReady, ModelLoadError, Qwen3Error
from qwen3_asgi.metrics.observers import Observers
from qwen3_asgi.metrics.spans import RequestSpans, check_installed
from qwen3_asgi.scheduler.loop import Scheduler
from qwen3_asgi.scheduler.trace import SchedulerTrace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from qwen3_asgi.config import EngineConfig
    from qwen3_asgi.engine.loading import LoadedModel
    from qwen3_asgi.metrics.recorder import EngineMetrics

logger = logging.getLogger(__name__)

EngineState = Literal["new", "starting", "ready", "draining", "stopped", "dead"]
EXIT_SECONDS = 10.0
FAILED = "the engine's scheduler thread has failed"
FORKED = (
    "the engine was started before this process was forked, and its scheduler thread stayed in the "
    "parent: start it in each worker, by its lifespan or on first use, and not before the fork"
)
# A start takes what the model takes to load; for who is refused meanwhile the best guess is that it
# takes as long again.
MIN_RETRY_SECONDS, MAX_RETRY_SECONDS = 1.0, 30.0


@dataclass(frozen=True, slots=True)
class Runtime:
    """Everything of a started engine; replaced as a whole by the next start."""

    model: LoadedModel
    scheduler: Scheduler
    delivery: Delivery
    adapters: Adapters
    watchdog: Watchdog
    spans: RequestSpans | None


@dataclass(frozen=True, slots=True)
class Stopping:
    """An engine that refuses new requests: `finish` it."""

    started: Future[Runtime]
    idle: Future[None] | None
    ended: Future[None]

    async def finish(self, drain: float) -> None:
        """Give live requests `drain` seconds, end the rest and wait for the thread's end."""
        try:
            if self.idle is not None:
                with anyio.move_on_after(drain):
                    await wait_future(self.idle)
        finally:
            self.end()
        await wait_future(self.ended)

    def finish_sync(self, drain: float) -> None:
        """`finish` for threads."""
        try:
            if self.idle is not None:
                with contextlib.suppress(TimeoutError):
                    self.idle.result(timeout=drain)
        finally:
            self.end()
        self.ended.result()

    def end(self) -> None:
        """End the scheduler, or let it end as soon as the model is loaded."""
        self.started.add_done_callback(_end_scheduler)


class Lifecycle:
    """One engine's scheduler thread. All methods may be called from any thread.

    `state` and `runtime` are written under `_lock` or by the scheduler thread, and read anywhere.
    """

    def __init__(
        self,
        name: str,
        config: EngineConfig,
        load: Callable[[], LoadedModel],
        metrics: EngineMetrics,
    ) -> None:
        self.state: EngineState = "new"
        self.runtime: Runtime | None = None
        self._name = name
        self._config = config
        self._load = load
        self._metrics = metrics
        self.trace: SchedulerTrace | None = None  # of the last start
        if config.tracing:
            check_installed()
        self._lock = threading.Lock()
        self._started: Future[Runtime] | None = None
        self._ended: Future[None] | None = None
        self._began_at = 0.0
        self._entries = 0
        self._death = FAILED

    def launch(self, *, lazily: bool = False) -> Future[Runtime]:
        """Start the thread unless it runs; the future completes when the model is loaded.

        `lazily` is the start on first use: it never revives an engine that was stopped or died.

        Raises:
            EngineNotReady: the engine is stopping, or was stopped and `lazily` is true.
            EngineDead: the scheduler thread failed and `lazily` is true.
        """
        with self._lock:
            return self._launch(lazily)

    def use(self) -> Future[Runtime]:
        """The lazy `launch` of a request. With `cold_start="refuse"` only the one that begins the
        start waits for it.

        Raises:
            EngineNotReady, EngineDead: as `launch`; or a start is under way and waits for nobody.
        """
        with self._lock:
            if self.state == "starting" and self._config.cold_start == "refuse":
                raise self.refusal()
            return self._launch(lazily=True)

    def refusal(self, state: EngineState | None = None) -> EngineDead | EngineNotReady:
        """The error for a request that an engine in this state (None: its own) does not take."""
        match state or self.state:
            case "dead":
                return EngineDead(self._death)
            case "starting":
                elapsed = time.monotonic() - self._began_at
                return EngineNotReady(
                    "the engine is not ready: the model is being loaded",
                    retry_after=min(max(elapsed, MIN_RETRY_SECONDS), MAX_RETRY_SECONDS),
                )
            case "draining":
                return EngineNotReady("the engine is shutting down")
            case other:
                return EngineNotReady(f"the engine is not ready: {other}")

    @contextmanager
    def entering(self) -> Iterator[None]:
        """Around a start that belongs to a `with` block or a lifespan: counts it as inside.

        A start that fails or is cancelled is taken back; it is not waited for.
        """
        with self._lock:
            self._entries += 1
        try:
            yield
        except BaseException:
            if (stopping := self.leave()) is not None:
                stopping.end()
            raise

    def leave(self) -> Stopping | None:
        """Leave a `with` block or a lifespan; the last one out stops the engine."""
        with self._lock:
            self._entries = max(0, self._entries - 1)  # a forked child leaves what it never entered
            return None if self._entries else self._begin_stop()

    @property
    def ending(self) -> Future[None] | None:
        """While the engine is stopping: completes when it has stopped."""
        with self._lock:
            return self._ended if self.state == "draining" else None

    def begin_stop(self) -> Stopping | None:
        """Refuse new requests from now on; returns how to go on, None if nothing runs."""
        with self._lock:
            return self._begin_stop()

    def renew(self) -> None:
        """Back to "new" from "stopped" or "dead", so that the first use starts it again."""
        with self._lock:
            if self.state in ("stopped", "dead"):
                self.state = "new"

    def after_fork(self) -> None:
        """In the child of a fork, which has none of the parent's threads.

        A lock that one of them held stays locked here for ever, so none is touched.
        """
        self._lock = threading.Lock()
        self._entries = 0
        if self.state in ("new", "stopped"):
            return
        runtime, self.runtime = self.runtime, None
        self._started = self._ended = None
        if self.state != "dead":
            self.state, self._death = "dead", FORKED
        if runtime is not None:
            runtime.delivery.fail_all(self.refusal())

    def _launch(self, lazily: bool) -> Future[Runtime]:
        if self.state in ("starting", "ready") and self._started is not None:
            return self._started
        if self.state == "draining" or (lazily and self.state in ("stopped", "dead")):
            raise self.refusal()
        started: Future[Runtime] = Future()
        ended: Future[None] = Future()
        exiting = threading.Event()
        at_exit = _stop_at_exit(started, ended, exiting)
        thread = threading.Thread(
            target=self._main,
            args=(started, ended, exiting, at_exit),
            name=f"qwen3-asgi {self._name}",
            daemon=True,  # a host that forgets to stop must still be able to exit
        )
        thread.start()  # may fail; the thread itself changes nothing before we let go the lock
        atexit.register(at_exit)
        self._began_at = time.monotonic()
        self.state = "starting"
        self._started, self._ended = started, ended
        return started

    def _begin_stop(self) -> Stopping | None:
        started, ended = self._started, self._ended
        if started is None or ended is None:
            return None
        self.state = "draining"
        idle = None if self.runtime is None else self.runtime.delivery.when_idle()
        return Stopping(started, idle, ended)

    def _main(
        self,
        started: Future[Runtime],
        ended: Future[None],
        exiting: threading.Event,
        at_exit: Callable[[], None],
    ) -> None:
        try:
            runtime = self._build()
        except BaseException as error:
            # Whoever waits gets the error as well; but a start by a probe has nobody waiting.
            logger.error("engine %s could not be loaded: %s", self._name, error)
            with self._lock:
                self.state = "stopped" if self.state == "draining" else "new"
                self._started = self._ended = None
            atexit.unregister(at_exit)
            if not exiting.is_set():
                started.set_exception(error)
            ended.set_result(None)
            return
        runtime.watchdog.start()
        with self._lock:
            self.runtime = runtime
            if self.state == "starting":  # else it was stopped while it was loading
                self.state = "ready"
        if exiting.is_set():
            runtime.scheduler.stop()
        else:
            started.set_result(runtime)
        final: EngineState = "dead"
        death = FAILED
        try:
            runtime.scheduler.run()
            final = "stopped"
        except BaseException as error:
            death = (
                f"{FAILED}: {error}" if isinstance(error, EngineDead) else f"{FAILED}: {error!r}"
            )
            logger.error("engine %s is dead; its requests have ended with an error", self._name)
        finally:
            runtime.watchdog.stop()
            if runtime.spans is not None:
                runtime.spans.close()
            try:
                runtime.model.executor.close()
            except Exception:
                logger.exception("closing the executor of engine %s failed", self._name)
            atexit.unregister(at_exit)
            self._metrics.close()
            # Last: a restart must find the device memory free, and set the gauges after us.
            with self._lock:
                self.runtime = None
                self.state, self._death = final, death
                self._started = self._ended = None
            ended.set_result(None)

    def _build(self) -> Runtime:
        model = self._load_model()
        try:
            return self._assemble(model)
        except BaseException:
            model.executor.close()  # its threads and files have no other owner yet
            raise

    def _assemble(self, model: LoadedModel) -> Runtime:
        startup.debug("ready")
        delivery = Delivery(self._metrics.on_wakeups)
        size = self._config.trace_iterations
        self.trace = SchedulerTrace(size) if size else None
        spans = RequestSpans(self._name) if self._config.tracing else None
        scheduler = Scheduler(
            model.executor,
            delivery,
            max_batch=self._config.max_batch,
            max_prefill_tokens=self._config.max_prefill_tokens,
            prefix_cache=self._config.prefix_cache,
            overlap=self._config.overlap,
            pipelined=self._config.pipelined,
            max_failures=self._config.max_failures,
            observer=Observers.of(self._metrics, self.trace, spans),
            trace=None if self.trace is None else self.trace.phase,
        )
        adapters = Adapters(
            scheduler, model.read_adapter, base=self._name, limit=self._config.max_adapters
        )
        watchdog = Watchdog(
            scheduler,
            delivery,
            self._config.step_warn_seconds,
            self._metrics.on_stall,
            name=self._name,
        )
        return Runtime(model, scheduler, delivery, adapters, watchdog, spans)

    def _load_model(self) -> LoadedModel:
        try:
            return self._load()
        except Qwen3Error:
            raise
        except Exception as error:
            # Of torch, mostly: no memory, no driver, CUDA after a fork. Its words say what to do.
            raise ModelLoadError(
                f"{self._name} could not be loaded: {type(error).__name__}: {error}"
            ) from error


def _end_scheduler(started: Future[Runtime]) -> None:
    if started.exception() is None:
        started.result().scheduler.stop()


def _end_silently(started: Future[Runtime]) -> None:
    if started.exception() is None:
        started.result().delivery.silence()
    _end_scheduler(started)


def _stop_at_exit(
    started: Future[Runtime], ended: Future[None], exiting: threading.Event
) -> Callable[[], None]:
    """A thread that is in the middle of C code when the interpreter goes may abort the process.

    Only daemon threads can still be waiting for this engine then. They are told nothing: Python
    stops them where they are, and an error would be a traceback at the end of a good program.
    """
    pid = os.getpid()

    def stop() -> None:
        if os.getpid() != pid:
            return  # a forked child has inherited this hook, but not the thread
        exiting.set()
        started.add_done_callback(_end_silently)
        try:
            ended.result(timeout=EXIT_SECONDS)
        except TimeoutError:
            logger.warning("the scheduler thread is still loading or in a step at exit")

    return stop
