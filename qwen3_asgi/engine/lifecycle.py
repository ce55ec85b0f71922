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
            self.state = "starting"
            started: Future[Runtime] = Future()
            ended: Future[None] = Future()
            self._started, self._ended = started, ended
            thread = threading.Thread(
                target=self._main,
                args=(started, ended),
                name=f"qwen3-asgi {self._name}",
                daemon=True,  # a host that forgets to stop must still be able to exit
            )
            thread.start()
            return started

    def begin_stop(self) -> tuple[Runtime, Future[None]] | None:
        """Refuse new requests from now on; returns what to wait for, None if nothing runs."""
        with self._lock:
            runtime, ended = self.runtime, self._ended
            if runtime is None or ended is None:
                return None
            if self.state == "ready":
                self.state = "draining"
            return runtime, ended

    def _main(self, started: Future[Runtime], ended: Future[None]) -> None:
        try:
            runtime = self._build()
        except BaseException as error:
            self.state = "new"
            started.set_exception(error)
            ended.set_result(None)
            return
        at_exit = _stop_at_exit(weakref.ref(runtime.scheduler), ended)
        atexit.register(at_exit)
        with self._lock:
            self.runtime = runtime
            self.state = "ready"
        started.set_result(runtime)
        final: EngineState = "dead"
        try:
            runtime.scheduler.run()
            final = "stopped"
        except BaseException:
            logger.error("engine %s is dead; its requests have ended with an error", self._name)
        finally:
            with self._lock:
                self.runtime = None
                self.state = final
            try:
                runtime.model.executor.close()
            except Exception:
                logger.exception("closing the executor of engine %s failed", self._name)
            atexit.unregister(at_exit)
            self._metrics.close()
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
