"""Whether torch's own paged attention can be used in place of our kernels."""

from __future__ import annotations

import inspect
import logging
from importlib import import_module
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from qwen3_asgi.model.kv import LayerKV

logger = logging.getLogger(__name__)

# Of `torch.nn.attention.varlen.varlen_attn`, torch 2.13 on; older ones lack some.
NEEDED = frozenset({"block_table", "seqused_k", "enable_gqa", "num_splits", "window_size"})


def find_varlen() -> Callable[..., Tensor] | None:
    """`varlen_attn`, if this torch has one that reads block tables."""
    try:
        found = getattr(import_module("torch.nn.attention.varlen"), "varlen_attn", None)
    except ImportError:
        return None
    return found if found is not None and reads_block_tables(found) else None


def reads_block_tables(function: Callable[..., object]) -> bool:
    """Whether it takes every argument that a paged batch needs; decided by its signature."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False
    return parameters.keys() >= NEEDED


def choose_varlen(
    function: Callable[..., Tensor] | None,
    trial: Callable[[Callable[..., Tensor]], tuple[Tensor, Tensor]],
) -> Callable[..., Tensor] | None:
    """`function` if it exists and a trial on the device gives what is expected, else None.

    A signature does not say which cards, dtypes, block sizes and strides the kernel behind it
    takes, so the trial runs it on the pool's own layout.

    Args:
        function: of `find_varlen`.
        trial: runs it and returns what it gave and what it should give.
    """
    if function is None:
        return None
    try:
        found, wanted = trial(function)
        torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-2)
    except (RuntimeError, NotImplementedError, TypeError, ValueError, AssertionError) as error:
        logger.info("attention runs in our kernels: torch's varlen_attn failed a trial: %s", error)
        return None
    return function


def pages(kv: LayerKV, block_size: int) -> tuple[Tensor, Tensor]:
    """Views of keys and values as `[blocks, block_size, kv_heads, head_dim]`, as torch wants them.

    The heads come first in memory all the same.
    """
    heads, slots, dim = kv.keys.shape
    shape = (heads, slots // block_size, block_size, dim)
    keys, values = (cache.view(shape).permute(1, 2, 0, 3) for cache in kv)
    return keys, values
