"""Whether a model on CUDA runs in the Triton kernels."""

from __future__ import annotations

import logging
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch

from qwen3_asgi.model.cuda.operators import CudaOperators

if TYPE_CHECKING:
    from qwen3_asgi.model.config import ModelConfig

logger = logging.getLogger(__name__)

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# What the tensor cores multiply at least.
MIN_HEAD_DIM = 16


def unsupported(config: ModelConfig, dtype: torch.dtype) -> str | None:
    """Why the kernels cannot run this model; None if they can."""
    if find_spec("triton") is None:
        return "triton is not installed"
    if dtype not in DTYPES:
        return f"dtype {str(dtype).removeprefix('torch.')}"
    if config.head_dim < MIN_HEAD_DIM or config.head_dim & (config.head_dim - 1):
        return f"head_dim {config.head_dim}"
    if config.num_heads % config.num_kv_heads:
        return f"{config.num_heads} heads over {config.num_kv_heads} KV heads"
    return None


def cuda_operators(config: ModelConfig, dtype: torch.dtype) -> CudaOperators | None:
    """Operators for a model on CUDA, or None where plain ones have to do, with one warning."""
    reason = unsupported(config, dtype)
    if reason is None:
        return CudaOperators(
            config.num_heads, config.num_kv_heads, config.head_dim, config.rms_norm_eps
        )
    logger.warning("CUDA kernels: not used (%s); steps run in plain torch, slower", reason)
    return None
