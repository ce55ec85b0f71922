"""How engines get into a registry: one collector per registry, showing every attached engine.

So a family appears once however many engines there are, attaching again changes nothing, and the
registry refuses anything else under our names as it does for its own metrics.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from prometheus_client import Metric
from prometheus_client.registry import Collector

from qwen3_asgi.errors import Qwen3Error
from qwen3_asgi.metrics.catalogue import CATALOGUE

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from prometheus_client import CollectorRegistry

    from qwen3_asgi.metrics.instruments import Instruments


class MetricNameTaken(Qwen3Error, ValueError):
    """The registry holds a metric of somebody else under one of our names."""


class MetricLabelsTaken(Qwen3Error, ValueError):
    """Another engine in the registry has the same model name and engine label."""


class FamiliesCollector(Collector):
    """What one registry shows: the catalogue's families, with the samples of its engines."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Replaced under the lock, never changed in place: a scrape reads it without the lock.
        self._engines: tuple[Instruments, ...] = ()

    def add(self, engine: Instruments) -> None:
        """Show this engine. Adding it again changes nothing.

        Raises:
            MetricLabelsTaken: another engine has its labels; the two would share one series.
        """
        with self._lock:
            if engine in self._engines:
                return
            if any(other.engine_labels == engine.engine_labels for other in self._engines):
                model_name, label = engine.engine_labels
                raise MetricLabelsTaken(
                    f'another engine with the labels model_name="{model_name}", engine="{label}" '
                    "is attached to this registry; give this one another engine label, or "
                    "detach the other"
                )
            self._engines += (engine,)

    def remove(self, engine: Instruments) -> None:
        with self._lock:
            self._engines = tuple(other for other in self._engines if other is not engine)

    def after_fork(self) -> None:
        self._lock = threading.Lock()

    def replace(self, old: Instruments, new: Instruments) -> None:
        """Show `new` instead of `old`, if that is shown."""
        self._engines = tuple(new if engine is old else engine for engine in self._engines)

    def describe(self) -> Iterable[Metric]:
        """The families without samples: the registry asks for them to see which names clash."""
        return [_metric(family.name, family.help, family.kind) for family in CATALOGUE]

    def collect(self) -> Iterator[Metric]:
        engines = self._engines
        for family in CATALOGUE:
            shown = _metric(family.name, family.help, family.kind)
            for engine in engines:
                for metric in engine.collect(family):
                    shown.samples.extend(metric.samples)
            yield shown


def _metric(name: str, text: str, kind: str) -> Metric:
    # prometheus_client keeps a counter's name without the suffix and adds it when it writes.
    return Metric(name.removesuffix("_total") if kind == "counter" else name, text, kind)


# The one module-level state of the package. A registry offers no way to ask which collectors it
# holds, and a second collector under the same names is "Duplicated timeseries": engines that know
# nothing of each other can only meet here. The keys are weak, so a registry dies with its owner.
_collectors: WeakKeyDictionary[CollectorRegistry, FamiliesCollector] = WeakKeyDictionary()
_collectors_lock = threading.Lock()


def attach(registry: CollectorRegistry, engine: Instruments) -> None:
    """Show an engine in a registry, from any thread, any number of times.

    Raises:
        MetricNameTaken: a metric that is not ours has one of our names; nothing was registered.
        MetricLabelsTaken: another engine in this registry has the same labels.
    """
    with _collectors_lock:
        known = _collectors.get(registry)
        collector = known or FamiliesCollector()
        try:
            # Again for a collector that is there already, where it changes nothing: somebody (test
            # clean-up, another library) may have emptied the registry since.
            registry.register(collector)
        except ValueError as error:
            if known is None:
                raise MetricNameTaken(
                    "this registry already holds metrics that are not ours under our names "
                    f"({error}); attach the engine to a registry of its own: "
                    "engine.metrics(registry=CollectorRegistry())"
                ) from error
        _collectors[registry] = collector
    collector.add(engine)


def detach(registry: CollectorRegistry, engine: Instruments) -> None:
    """Stop showing an engine in a registry; nothing happens if it was not attached."""
    with _collectors_lock:
        collector = _collectors.get(registry)
    if collector is not None:
        collector.remove(engine)


def after_fork() -> None:
    """In the child of a fork, where a lock may be held by a thread that is not there."""
    global _collectors_lock
    _collectors_lock = threading.Lock()
    for collector in list(_collectors.values()):
        collector.after_fork()


def replace(old: Instruments, new: Instruments) -> None:
    """In the child of a fork: show an engine's new instruments wherever it was attached."""
    for collector in list(_collectors.values()):
        collector.replace(old, new)
