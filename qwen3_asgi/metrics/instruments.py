"""The prometheus_client objects of one engine. They count whether or not a registry shows them.

Each engine owns one set, however many registries it is attached to: a token is written once, and
a registry attached late shows everything since the start. In prometheus_client's multiprocess
mode it must be one set: two objects with equal labels would overwrite each other in the file.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from functools import partial
from typing import TYPE_CHECKING, Any

from prometheus_client import Counter, Gauge, Histogram, values

from qwen3_asgi.metrics.catalogue import (
    CATALOGUE,
    CounterFamily,
    Family,
    GaugeFamily,
    HistogramFamily,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from prometheus_client import Metric


def multiprocess_mode() -> bool:
    """Whether prometheus_client keeps its values in files that the processes share."""
    # It chose when it was imported. Reading its environment variable here could tell otherwise.
    return values.ValueClass is not values.MutexValue


def observe_many(histogram: Histogram) -> Callable[[float, int], None]:
    """A function that observes one value a number of times.

    A step's tokens come together, and `observe` walks the buckets and takes two locks for each of
    them. prometheus_client offers nothing else, so its own fields are used if they are as known.
    """
    total: Any = getattr(histogram, "_sum", None)
    bounds: Sequence[float] = getattr(histogram, "_upper_bounds", ())
    buckets: Sequence[Any] = getattr(histogram, "_buckets", ())
    known = (
        hasattr(total, "inc")
        and 0 < len(bounds) == len(buckets)
        and bounds[-1] == math.inf
        and all(hasattr(bucket, "inc") for bucket in buckets)
    )
    if not known:
        return partial(_observe_each, histogram)

    def observe(value: float, count: int) -> None:
        # The first bucket that holds the value; `collect` adds them up.
        buckets[bisect_left(bounds, value)].inc(count)
        total.inc(value * count)

    return observe


def _observe_each(histogram: Histogram, value: float, count: int) -> None:
    for _ in range(count):
        histogram.observe(value)


class Instruments:
    """The metric objects of one engine, one per family of the catalogue, in no registry."""

    def __init__(self, model_name: str, engine_label: str) -> None:
        self.engine_labels = (model_name, engine_label)
        self._gauges: dict[str, Gauge] = {}
        self._counters: dict[str, Counter] = {}
        self._histograms: dict[str, Histogram] = {}
        for family in CATALOGUE:
            match family:
                case GaugeFamily(name, text, multiprocess_mode=mode):
                    self._gauges[name] = Gauge(
                        name, text, family.labels, registry=None, multiprocess_mode=mode
                    )
                case CounterFamily(name, text):
                    self._counters[name] = Counter(name, text, family.labels, registry=None)
                case HistogramFamily(name, text, buckets=buckets):
                    self._histograms[name] = Histogram(
                        name, text, family.labels, registry=None, buckets=buckets
                    )

    def gauge(self, family: GaugeFamily, *own: str) -> Gauge:
        """The gauge with these values of the family's own labels."""
        return self._gauges[family.name].labels(*self.engine_labels, *own)

    def counter(self, family: CounterFamily, *own: str) -> Counter:
        """The counter with these values of the family's own labels."""
        return self._counters[family.name].labels(*self.engine_labels, *own)

    def histogram(self, family: HistogramFamily, *own: str) -> Histogram:
        """The histogram with these values of the family's own labels."""
        return self._histograms[family.name].labels(*self.engine_labels, *own)

    def collect(self, family: Family) -> Iterable[Metric]:
        """The samples of one family."""
        name = family.name
        match family.kind:
            case "gauge":
                return self._gauges[name].collect()
            case "counter":
                return self._counters[name].collect()
            case "histogram":
                return self._histograms[name].collect()
