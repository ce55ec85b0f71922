"""torch's own paged attention for chunks of prompts, where it can take the place of our kernel."""

from __future__ import annotations

import inspect
import logging
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from qwen3_asgi.model.batch import Batch
    from qwen3_asgi.model.kv import LayerKV

    VarlenAttention = Callable[..., Tensor]

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


class Chunks(NamedTuple):
    """The spans of a batch behind its first `first`, which are of one token each.

    `ends` is int32 `[n + 1]`, the running sum of their lengths; `held` int32 `[n]`, how many
    positions each has in the pool; `tables` int32 `[n, most blocks]`. `longest` and `most_held` are
    bounds of their lengths and of `held`.
    """

    first: int
    ends: Tensor
    held: Tensor
    tables: Tensor
    longest: int
    most_held: int


def chunks_of(batch: Batch, first: int) -> Chunks:
    """
    Raises:
        ValueError: the batch was built without block tables.
    """
    paged = batch.paged
    if paged is None:
        raise ValueError("attention reads block tables: build the batch with paged=True")
    spans = paged.spans[first:]
    lasts = batch.last_rows[first:]
    befores = (first - 1, *lasts[:-1])
    most_held = batch.last_position + 1
    blocks = torch.arange(-(-most_held // paged.block_size), device=spans.device)
    # Behind the end of a sequence stand ids of others; `held` says that they are not to be read.
    at = (spans[:, 3:] + blocks).clamp_(max=len(paged.tables) - 1)
    return Chunks(
        first,
        functional.pad(spans[:, 1].cumsum(0), (1, 0)).to(torch.int32),
        (spans[:, 1] + spans[:, 2]).to(torch.int32),
        paged.tables[at],
        max(last - before for last, before in zip(lasts, befores, strict=True)),
        most_held,
    )


def attend_chunks(
    attention: VarlenAttention,
    queries: Tensor,
    kv: LayerKV,
    block_size: int,
    chunks: Chunks,
    out: Tensor,
    *,
    num_heads: int,
) -> None:
    """`attention.paged_attention` of the chunks alone, by `varlen_attn`."""
    dim = kv.keys.shape[2]
    keys, values = pages(kv, block_size)
    own = queries[chunks.first :, : num_heads * dim]
    found = attention(
        own.view(len(own), num_heads, dim),
        keys,
        values,
        chunks.ends,
        None,
        chunks.longest,
        chunks.most_held,
        window_size=(-1, 0),
        enable_gqa=True,
        seqused_k=chunks.held,
        block_table=chunks.tables,
        # Otherwise how a row is computed depends on the longest of the batch.
        num_splits=1,
    )
    out[chunks.first :] = found.flatten(1)
