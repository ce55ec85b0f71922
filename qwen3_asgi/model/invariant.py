"""Batch-invariant mode: what a row's numbers come from is that row and the tokens before it.

Nothing else of a step may reach its last bit: neither how many rows there are and which of them
this one is, nor whether it was decoded, part of a chunk of any length, or computed once more after
a preemption. A matrix product promises none of this by itself: libraries choose their kernels, and
with them the order of their sums, by the number of rows (He et al. 2025, "Defeating nondeterminism
in LLM inference", Thinking Machines Lab). So here is a `Linear` whose order is fixed, and the
choice of operators that have one order for decoding and chunks.
"""

from __future__ import annotations

import logging
from hashlib import blake2b
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from qwen3_asgi.errors import ModelLoadError
from qwen3_asgi.model.cpu.build import fingerprint
from qwen3_asgi.model.cpu.kernels import WIDTH_MULTIPLE, cpu_kernels
from qwen3_asgi.model.cpu.linear import panel_linear
from qwen3_asgi.model.cuda.choosing import unsupported
from qwen3_asgi.model.cuda.operators import CudaOperators
from qwen3_asgi.model.invariant_cuda import Programs
from qwen3_asgi.model.invariant_operators import TiledOperators
from qwen3_asgi.model.invariant_tiles import Tiles
from qwen3_asgi.model.operators import TorchOperators
from qwen3_asgi.model.self_check import find_fault

if TYPE_CHECKING:
    from torch import Tensor

    from qwen3_asgi.model.config import ModelConfig
    from qwen3_asgi.model.cpu.arena import Arena
    from qwen3_asgi.model.linear import LinearLayer
    from qwen3_asgi.model.operators import Operators

logger = logging.getLogger(__name__)


class _Padded:
    """A `LinearLayer` whose depth was filled up with zeros, which change no sum."""

    __slots__ = ("_layer", "_missing", "shape")

    def __init__(self, layer: LinearLayer, missing: int) -> None:
        self._layer = layer
        self._missing = missing
        self.shape = (layer.shape[0], layer.shape[1] - missing)

    def __call__(self, x: Tensor) -> Tensor:
        return self._layer(functional.pad(x, (0, self._missing)))


def invariant_linear(weight: Tensor, arena: Arena | None = None) -> LinearLayer:
    """A layer of a weight `[out, in]`; each row of its product depends on that row of `x` alone.

    It holds one copy of the weight, or the weight itself.
    """
    if weight.device.type == "cuda":
        return Programs(weight)
    # Adapters have ranks of any size.
    missing = -weight.shape[1] % WIDTH_MULTIPLE
    whole = functional.pad(weight, (0, missing)) if missing else weight
    panels = panel_linear(whole, arena)
    if panels is None:
        return Tiles(weight)
    return _Padded(panels, missing) if missing else panels


def invariant_operators(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> Operators:
    """Operators of the model with one order of summation for decoding and chunks.

    Raises:
        ModelLoadError: the device has none for this model.
    """
    heads = (config.num_heads, config.num_kv_heads, config.head_dim)
    if device.type == "cpu":
        tiled = TiledOperators(*heads, config.rms_norm_eps)
        compiled = cpu_kernels(config, dtype, one_order=True)
        return (
            tiled if compiled is None or _are_wrong(compiled, config, dtype, device) else compiled
        )
    if (reason := unsupported(config, dtype)) is not None:
        raise ModelLoadError(
            f"batch_invariant=True on {device} needs the Triton kernels, and {reason}; use "
            f"batch_invariant=False, or device='cpu'"
        )
    kernels = CudaOperators(*heads, config.rms_norm_eps, one_order=True)
    if _are_wrong(kernels, config, dtype, device):
        raise ModelLoadError(
            f"batch_invariant=True on {device} needs the Triton kernels, which were wrong on trial "
            f"there; use batch_invariant=False, or device='cpu'"
        )
    return kernels


def _are_wrong(
    operators: Operators, config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> bool:
    plain = TorchOperators(
        config.num_heads, config.num_kv_heads, config.head_dim, config.rms_norm_eps
    )
    fault = find_fault(operators, plain, config, dtype, device)
    if fault is not None:
        logger.warning("%s were wrong on trial: %s", type(operators).__name__, fault)
    return fault is not None


def order_of(operators: Operators, dtype: torch.dtype, device: torch.device) -> str:
    """A name for the order of summation that this process computes in, with these operators.

    KV blocks that are kept for a later process are worth something in this mode only where that
    one computes the same bits.
    """
    parts = [torch.__version__, device.type, str(dtype)]
    if device.type == "cuda":
        parts.append(torch.cuda.get_device_name(device))
    else:
        parts.append(fingerprint())
        parts.append(type(operators).__name__)
        # Plain products are split among threads as the library likes.
        if isinstance(operators, TiledOperators):
            parts.append(f"{torch.get_num_threads()} threads")
    return blake2b("\0".join(parts).encode(), digest_size=16).hexdigest()
