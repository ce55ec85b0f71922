"""Where the time of an executor's step goes, seen by stopwatches around its parts.

Stopwatches cost time themselves, so totals are to be taken without them. On CUDA each part is
bracketed by events on the stream, and what is split are the operations of a step that runs without
graphs, with the host's sampler.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, Literal, cast

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from qwen3_asgi.model.cpu.layers import Seconds
    from qwen3_asgi.model.executor import TorchExecutor
    from qwen3_asgi.model.operators import Operators

Part = Literal["attention", "linear", "norm", "sampling"]
PARTS: tuple[Part, ...] = ("attention", "linear", "norm", "sampling")


class Stopwatches:
    """Seconds of each part since the last `take`."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._seconds: dict[Part, float] = dict.fromkeys(PARTS, 0.0)
        self._events: list[tuple[Part, torch.cuda.Event, torch.cuda.Event]] = []

    def around(self, part: Part, call: Callable[..., Any]) -> Callable[..., Any]:
        """`call`, timed as this part."""
        if self._cuda:

            def timed(*arguments: Any) -> Any:
                event: Any = torch.cuda.Event
                begin, end = event(enable_timing=True), event(enable_timing=True)
                begin.record()
                found = call(*arguments)
                end.record()
                self._events.append((part, begin, end))
                return found
        else:

            def timed(*arguments: Any) -> Any:
                begin = time.perf_counter()
                found = call(*arguments)
                self._seconds[part] += time.perf_counter() - begin
                return found

        return timed

    def add_layers(self, seconds: Seconds) -> None:
        """Count what was measured where all layers run in one call."""
        self._seconds["attention"] += seconds.attention
        self._seconds["linear"] += seconds.linear
        self._seconds["norm"] += seconds.norm

    def take(self) -> dict[Part, float]:
        """What was measured; on CUDA, after the step has been waited for."""
        for part, begin, end in self._events:
            self._seconds[part] += begin.elapsed_time(end) / 1000
        found, self._seconds = self._seconds, dict.fromkeys(PARTS, 0.0)
        self._events = []
        return found


class _Timed:
    """Stands before an object: calls of it and of its `parts` are timed, all else is its own."""

    def __init__(self, inner: Any, watches: Stopwatches, **parts: Part) -> None:
        self._inner = inner
        self._timed = {
            name: watches.around(part, inner if name == "call" else getattr(inner, name))
            for name, part in parts.items()
        }

    def __call__(self, *arguments: Any) -> Any:
        return self._timed["call"](*arguments)

    def __getattr__(self, name: str) -> Any:
        timed: dict[str, Any] = self.__dict__["_timed"]
        return timed.get(name) or getattr(self.__dict__["_inner"], name)


class _TimedOperators(_Timed):
    """Attention is a function that `attention` returns once for all layers."""

    def __init__(self, inner: Operators, watches: Stopwatches) -> None:
        super().__init__(inner, watches, norm="norm", add_norm="norm", silu_mul="norm")
        self._watches = watches

    def attention(self, *arguments: Any) -> Any:
        return self._watches.around("attention", self._inner.attention(*arguments))


@contextmanager
def split(executor: TorchExecutor) -> Iterator[Stopwatches]:
    """Steps inside are timed by part; outside the executor is as it was.

    `attention` has the QK norm, RoPE and the KV write in it, `norm` the activation, and `linear`
    the vocabulary product.

    Raises:
        RuntimeError: the executor is closed.
    """
    model, _ = executor._open()
    weights, operators, sampler = model._weights, model.operators, executor._sampler
    cuda = executor._cuda
    watches = Stopwatches(executor.device)

    def timed(linear: Any) -> Any:
        return _Timed(linear, watches, call="linear")

    layers = weights.layers
    whole = model.whole
    if whole is None:
        model.operators = cast("Operators", _TimedOperators(operators, watches))
        layers = tuple(
            replace(
                layer,
                **{
                    each.name: timed(getattr(layer, each.name))
                    for each in fields(layer)
                    if callable(getattr(layer, each.name))
                },
            )
            for layer in layers
        )
    else:
        whole.on_seconds = watches.add_layers
    model._weights = replace(weights, layers=layers, lm_head=timed(weights.lm_head))
    executor._sampler = cast("Any", _Timed(sampler, watches, sample="sampling"))
    executor._cuda = None  # graphs have no parts
    try:
        yield watches
    finally:
        model._weights, executor._sampler = weights, sampler
        if whole is None:
            model.operators = operators
        else:
            whole.on_seconds = None
        executor._cuda = cuda
