"""Start, run and end of the scheduler thread: the states of an engine and who may change them.

The thread loads the model itself, so that one thread alone ever touches the device.
"""

from __future__ import annotations

import atexit
import logging
import threading
import weakref
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from qwen3_asgi.engine.delivery import Delivery
from qwen3_asgi.errors import EngineDead, EngineNotReady
from qwen3_asgi.scheduler.loop import Scheduler

if TYPE_CHECKING:
    from collections.abc import Callable

    from qwen3_asgi.config import EngineConfig
    from qwen3_asgi.engine.loading import LoadedModel
    from qwen3_asgi.metrics.recorder import EngineMetrics

logger = logging.getLogger(__name__)

EngineState = Literal["new", "starting", "ready", "draining", "stopped", "dead"]
EXIT_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Runtime:
    """Everything of a started engine; replaced as a whole by the next start."""

    model: LoadedModel
    scheduler: Scheduler
    delivery: Delivery


@dataclass(frozen=True, slots=True)
class Stopping:
    """An engine that refuses new requests: wait for `idle` (if it is given), `end` it, wait for
    `ended`."""

    started: Future[Runtime]
    idle: Future[None] | None
    ended: Future[None]

    def end(self) -> None:
        """End the scheduler, or let it end as soon as the model is loaded."""
        self.started.add_done_callback(_end_scheduler)


class Lifecycle:
    """One engine's scheduler thread. `launch` and `begin_stop` may be called from any thread.

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
        self._lock = threading.Lock()
        self._started: Future[Runtime] | None = None
        self._ended: Future[None] | None = None

    def launch(self, *, lazily: bool) -> Future[Runtime]:
        """Start the thread unless it runs; the future completes when the model is loaded.

        `lazily` is the start on first use: it never revives an engine that was stopped or died.

        Raises:
            EngineNotReady: the engine is stopping, or was stopped and `lazily` is true.
            EngineDead: the scheduler thread failed and `lazily` is true.
        """
        with self._lock:
            if self.state in ("starting", "ready") and self._started is not None:
                return self._started
            if self.state == "draining":
                raise EngineNotReady("the engine is shutting down")
            if lazily and self.state == "stopped":
                raise EngineNotReady("the engine was stopped")
            if lazily and self.state == "dead":
                raise EngineDead("the engine's scheduler thread has failed")
            started: Future[Runtime] = Future()
            ended: Future[None] = Future()
            thread = threading.Thread(
                target=self._main,
                args=(started, ended),
                name=f"qwen3-asgi {self._name}",
                daemon=True,  # a host that forgets to stop must still be able to exit
            )
            thread.start()  # may fail; the thread itself changes nothing before we let go the lock
            self.state = "starting"
            self._started, self._ended = started, ended
            return started

    def begin_stop(self) -> Stopping | None:
        """Refuse new requests from now on; returns how to go on, None if nothing runs."""
        with self._lock:
            started, ended = self._started, self._ended
            if started is None or ended is None:
                return None
            self.state = "draining"
            idle = None if self.runtime is None else self.runtime.delivery.when_idle()
            return Stopping(started, idle, ended)

    def _main(self, started: Future[Runtime], ended: Future[None]) -> None:
        try:
            runtime = self._build()
        except BaseException as error:
            # Whoever waits gets the error as well; but a start by a probe has nobody waiting.
            logger.error("engine %s could not be loaded: %s", self._name, error)
            with self._lock:
                self.state = "stopped" if self.state == "draining" else "new"
                self._started = self._ended = None
            started.set_exception(error)
            ended.set_result(None)
            return
        at_exit = _stop_at_exit(weakref.ref(runtime.scheduler), ended)
        atexit.register(at_exit)
        with self._lock:
            self.runtime = runtime
            if self.state == "starting":  # else it was stopped while it was loading
                self.state = "ready"
        started.set_result(runtime)
        final: EngineState = "dead"
        try:
            runtime.scheduler.run()
            final = "stopped"
        except BaseException:
            logger.error("engine %s is dead; its requests have ended with an error", self._name)
        finally:
            try:
                runtime.model.executor.close()
            except Exception:
                logger.exception("closing the executor of engine %s failed", self._name)
            atexit.unregister(at_exit)
            self._metrics.close()
            # Last: a restart must find the device memory free, and set the gauges after us.
            with self._lock:
                self.runtime = None
                self.state = final
                self._started = self._ended = None
            ended.set_result(None)

    def _build(self) -> Runtime:
        model = self._load()
        delivery = Delivery(self._metrics.on_wakeups)
        scheduler = Scheduler(
            model.executor,
            delivery,
            max_batch=self._config.max_batch,
            max_prefill_tokens=self._config.max_prefill_tokens,
            prefix_cache=self._config.prefix_cache,
            observer=self._metrics,
        )
        return Runtime(model, scheduler, delivery)


def _end_scheduler(started: Future[Runtime]) -> None:
    if started.exception() is None:
        started.result().scheduler.stop()


def _stop_at_exit(reference: weakref.ref[Scheduler], ended: Future[None]) -> Callable[[], None]:
    def stop() -> None:
        scheduler = reference()
        if scheduler is not None:
            scheduler.stop()
            try:
                ended.result(timeout=EXIT_SECONDS)
            except TimeoutError:
                logger.warning("the scheduler thread is still in a step at exit")

    return stop
