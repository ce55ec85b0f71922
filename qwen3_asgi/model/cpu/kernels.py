"""The compiled kernels as the model's `Operators`, and the decision whether to use them.

The library is called with addresses, so everything it relies on is checked here.
"""

from __future__ import annotations

import ctypes
import logging
from typing import TYPE_CHECKING, Any

import torch

from qwen3_asgi.model.cpu.library import check, is_wide, kernel_library

if TYPE_CHECKING:
    from torch import Tensor

    from qwen3_asgi.model.batch import Batch
    from qwen3_asgi.model.config import ModelConfig
    from qwen3_asgi.model.kv import LayerKV
    from qwen3_asgi.model.operators import Attention

logger = logging.getLogger(__name__)

DTYPES = (torch.bfloat16, torch.float32)
HEAD_DIMS = (16, 32, 64, 128)
# Rows are worked on in whole vectors, of 16 floats at most.
WIDTH_MULTIPLE = 16
# Query heads per KV head: a block of query rows holds this many at least four times.
MAX_GROUP = 16


class Step(ctypes.Structure):
    """`Step` of pool.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("tokens", "heads", "kv_heads", "head_dim")),
        *((name, ctypes.c_int64) for name in ("block_size", "num_slots", "num_spans", "threads")),
        ("uniform", ctypes.c_int64),
        ("eps", ctypes.c_double),
        *((name, ctypes.c_void_p) for name in ("cos", "sin", "slots", "spans", "tables")),
    )


class CpuKernels:
    """Operators of one model's shape in bf16 or float32.

    A row's result depends on that row and, for attention, on the keys up to it, in an order fixed
    by its own position: not on the rest of the batch, nor on the number of threads. With
    `one_order` it depends as little on whether the row was decoded or part of a chunk of any
    length; decoding is slower then.
    """

    reads_tables = True

    def __init__(
        self, library: ctypes.CDLL, config: ModelConfig, *, one_order: bool = False
    ) -> None:
        self._heads, self._kv_heads = config.num_heads, config.num_kv_heads
        self._head_dim = config.head_dim
        self._eps = config.rms_norm_eps
        self._one_order = one_order
        self._library = library

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return self._add_norm(x.contiguous(), None, weight)

    def add_norm(self, x: Tensor, delta: Tensor, weight: Tensor) -> Tensor:
        if not x.is_contiguous():
            raise ValueError("x is added to in place, so it must be contiguous")
        return self._add_norm(x, delta.contiguous(), weight)

    def _add_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor) -> Tensor:
        rows, width = x.shape
        out = torch.empty_like(x)
        self._library.qwen3_add_norm(
            is_wide(x),
            x.data_ptr(),
            None if delta is None else delta.data_ptr(),
            weight.data_ptr(),
            out.data_ptr(),
            rows,
            width,
            self._eps,
            torch.get_num_threads(),
        )
        return out

    def step(self, batch: Batch, cos: Tensor, sin: Tensor) -> Step:
        """What the library has to know of a step, all but `num_slots`.

        It goes by the addresses of its arguments, which the caller holds.
        """
        paged = batch.paged
        assert paged is not None
        return Step(
            tokens=batch.token_ids.shape[0],
            heads=self._heads,
            kv_heads=self._kv_heads,
            head_dim=self._head_dim,
            block_size=paged.block_size,
            num_spans=paged.spans.shape[0],
            threads=torch.get_num_threads(),
            uniform=self._one_order,
            eps=self._eps,
            cos=cos.data_ptr(),
            sin=sin.data_ptr(),
            slots=batch.slots.data_ptr(),
            spans=paged.spans.data_ptr(),
            tables=paged.tables.data_ptr(),
        )

    def attention(self, batch: Batch, cos: Tensor, sin: Tensor) -> Attention:
        step = self.step(batch, cos, sin)
        # `batch`, `cos` and `sin` live as long as this function, which holds them.
        held = (batch, cos, sin)

        def run(fused: Tensor, qk_norm: Tensor, kv: LayerKV) -> Tensor:
            fused = fused.contiguous()
            step.num_slots = kv.keys.shape[1]
            out = fused.new_empty((len(held[0].token_ids), self._heads * self._head_dim))
            status = self._library.qwen3_attention(
                ctypes.byref(step),
                is_wide(fused),
                fused.data_ptr(),
                qk_norm.data_ptr(),
                kv.keys.data_ptr(),
                kv.values.data_ptr(),
                out.data_ptr(),
            )
            check(status)
            return out

        return run

    def run_layers(
        self,
        step: Step,
        layers: ctypes.Array[Any],
        first_norm: Tensor,
        x: Tensor,
        out: Tensor,
        wanted: Tensor,
        seconds: ctypes.Array[ctypes.c_double] | None,
    ) -> None:
        """See `cpu.layers.CpuLayers`."""
        status = self._library.qwen3_layers(
            *(ctypes.byref(step), is_wide(x), layers, len(layers)),
            *(first_norm.data_ptr(), x.data_ptr(), out.data_ptr()),
            *(wanted.data_ptr(), len(wanted), seconds),
        )
        check(status)

    def silu_mul(self, fused: Tensor) -> Tensor:
        fused = fused.contiguous()
        rows, width = len(fused), fused.shape[1] // 2
        out = fused.new_empty((rows, width))
        self._library.qwen3_silu_mul(
            is_wide(fused),
            fused.data_ptr(),
            out.data_ptr(),
            rows,
            width,
            torch.get_num_threads(),
        )
        return out


def unsupported(config: ModelConfig, dtype: torch.dtype) -> str | None:
    """Why the kernels cannot run this model; None if they can."""
    if dtype not in DTYPES:
        return f"dtype {str(dtype).removeprefix('torch.')}"
    if config.head_dim not in HEAD_DIMS:
        return f"head_dim {config.head_dim}"
    if config.num_heads % config.num_kv_heads or config.num_heads > MAX_GROUP * config.num_kv_heads:
        return f"{config.num_heads} heads over {config.num_kv_heads} KV heads"
    for width in (config.hidden_size, config.intermediate_size):
        if width % WIDTH_MULTIPLE:
            return f"width {width}"
    return None


def cpu_kernels(
    config: ModelConfig, dtype: torch.dtype, *, one_order: bool = False
) -> CpuKernels | None:
    """Kernels for a model on the CPU, or None where plain operators have to do; never raises.

    Logs one line in either case.
    """
    reason = unsupported(config, dtype)
    if reason is None:
        library, reason = kernel_library()
        if library is not None:
            logger.info("CPU kernels: compiled (%s)", torch.backends.cpu.get_cpu_capability())
            return CpuKernels(library, config, one_order=one_order)
    logger.warning("CPU kernels: not used (%s); steps run in plain torch, slower", reason)
    return None
