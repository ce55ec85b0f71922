"""All layers of a model in one call of the compiled library.

The same kernels as layer by layer, and the same bits; what is saved is the way to and from Python
between them, and waking the threads for each.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, NamedTuple

import torch

from qwen3_asgi.model.cpu.kernels import CpuKernels
from qwen3_asgi.model.cpu.linear import Int8Linear, Matrix, PanelLinear

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from qwen3_asgi.model.batch import Batch
    from qwen3_asgi.model.kv import KVPool
    from qwen3_asgi.model.operators import Operators
    from qwen3_asgi.model.weights import ModelWeights

MATRICES = ("qkv", "output", "gate_up", "down")


class _LayerParts(ctypes.Structure):
    """`LayerParts` of layers.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("qk_norm", "post_attention_norm", "norm_after")),
        *((name, ctypes.c_void_p) for name in ("keys", "values")),
        *((name, Matrix) for name in MATRICES),
    )


class Seconds(NamedTuple):
    """What a call spent on the parts of its layers."""

    attention: float
    linear: float
    norm: float


class CpuLayers:
    """The layers of a model whose matrices are all the library's. Several threads may run steps.

    `on_seconds`, where it is set, is called after each run, which is then timed.
    """

    def __init__(self, kernels: CpuKernels, weights: ModelWeights) -> None:
        self._kernels = kernels
        self._weights = weights
        self._parts = (_LayerParts * len(weights.layers))()
        norms_after = (*(layer.input_norm for layer in weights.layers[1:]), weights.final_norm)
        for parts, layer, norm_after in zip(self._parts, weights.layers, norms_after, strict=True):
            parts.qk_norm = layer.qk_norm.data_ptr()
            parts.post_attention_norm = layer.post_attention_norm.data_ptr()
            parts.norm_after = norm_after.data_ptr()
            for name in MATRICES:
                setattr(parts, name, getattr(layer, name).matrix)
        self._pool: KVPool | None = None
        self.on_seconds: Callable[[Seconds], None] | None = None

    def __call__(
        self,
        x: Tensor,
        batch: Batch,
        pool: KVPool,
        cos: Tensor,
        sin: Tensor,
        wanted: Sequence[int] | None,
    ) -> Tensor:
        """Run all layers on the embedded tokens `x` `[T, hidden]`, which is overwritten.

        `cos` and `sin` are as for `Operators.attention`. Returns normalised hidden states of the
        rows `wanted`, ascending, or of all: `[W, hidden]`. Of the last layer, others have no more
        than their keys and values computed.
        """
        count = len(x)
        if wanted is None:
            wanted = range(count)
        elif any(not 0 <= row < count for row in wanted) or list(wanted) != sorted(set(wanted)):
            raise ValueError(f"rows {wanted} are not in order, or not all of 0 to {count - 1}")
        rows = torch.tensor(wanted, dtype=torch.int64)
        self._use(pool)
        first_norm = self._weights.layers[0].input_norm
        step = self._kernels.step(batch, cos, sin)
        step.num_slots = pool.layers[0].keys.shape[1]
        out = torch.empty_like(x)
        seconds = (ctypes.c_double * 3)() if self.on_seconds else None
        self._kernels.run_layers(step, self._parts, first_norm, x, out, rows, seconds)
        if self.on_seconds and seconds:
            self.on_seconds(Seconds(*seconds))
        return out[: len(rows)]

    def _use(self, pool: KVPool) -> None:
        if pool is self._pool:
            return
        for parts, kv in zip(self._parts, pool.layers, strict=True):
            parts.keys, parts.values = kv.keys.data_ptr(), kv.values.data_ptr()
        self._pool = pool


def cpu_layers(operators: Operators, weights: ModelWeights) -> CpuLayers | None:
    """The layers of a model in one call, or None where they have to be run one by one."""
    if not isinstance(operators, CpuKernels):
        return None
    for layer in weights.layers:
        norms = (layer.input_norm, layer.qk_norm, layer.post_attention_norm)
        if not all(norm.is_contiguous() for norm in norms):
            return None
        if not all(isinstance(getattr(layer, name), PanelLinear | Int8Linear) for name in MATRICES):
            return None
    return CpuLayers(operators, weights)
