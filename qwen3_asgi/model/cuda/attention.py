"""Paged attention of a step on CUDA: rows of one token in pieces, chunks of prompts in tiles."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from qwen3_asgi.model.upload import upload

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from qwen3_asgi.model.batch import Paged
    from qwen3_asgi.model.kv import LayerKV

# Fixed, so that where a sequence is cut depends on the sequence alone. A piece is long enough that
# merging costs little beside reading it, and short enough that one sequence fills a card.
PIECE_TOKENS = 512
TILE_ROWS = 64
# The tensor cores want at least this many rows.
MIN_ROWS = 16
BLOCK_TOKENS = 64


class Layout(NamedTuple):
    """How a step's rows are spread over programs.

    The first `num_single` spans are of one token. `tiles` is int64 `[n, 2]`, which span and how
    many of its tokens come before the tile; None without chunks. `num_pieces` is for the longest.
    """

    num_single: int
    num_pieces: int
    tiles: Tensor | None


def lay_out(
    last_rows: Sequence[int],
    last_position: int,
    group: int,
    device: torch.device,
    *,
    one_order: bool = False,
) -> Layout:
    """Spread rows whose last tokens are at `last_rows` of the batch, as `Batch` has them.

    Leading rows of one token are decoded in pieces, all others go in tiles: a plan has its decode
    rows first. With `one_order` all rows go in tiles, where each is treated alike.
    """
    lengths = [end - begin for begin, end in zip((-1, *last_rows[:-1]), last_rows, strict=True)]
    num_single = 0
    if not one_order:
        num_single = next((i for i, length in enumerate(lengths) if length > 1), len(lengths))
    step = tile_tokens(group)
    tiles = [
        (span, skipped)
        for span in range(num_single, len(lengths))
        for skipped in range(0, lengths[span], step)
    ]
    return Layout(
        num_single,
        -(-(last_position + 1) // PIECE_TOKENS),
        upload(tiles, torch.int64, device) if tiles else None,
    )


def tile_tokens(group: int) -> int:
    return max(TILE_ROWS, _rows(group)) // group


def paged_attention(
    queries: Tensor, kv: LayerKV, paged: Paged, layout: Layout, out: Tensor, *, num_heads: int
) -> None:
    """Each token sees its sequence's positions up to its own, all of which are in the pool.

    Args:
        queries: `[T, ≥ N D]`, heads side by side at the front of a row.
        kv: of the pool; the strides are free, but the same for keys and values.
        out: `[T, N D]`, contiguous. Rows of spans that hold nothing become 0.
    """
    from qwen3_asgi.model.cuda.kernels.attention import chunk_kernel, decode_kernel, merge_kernel

    kv_heads, _, dim = kv.keys.shape
    if kv.keys.stride() != kv.values.stride():
        raise ValueError(f"strides differ: keys {kv.keys.stride()}, values {kv.values.stride()}")
    group = num_heads // kv_heads
    cache = (kv.keys, kv.values, *kv.keys.stride())
    scale = dim**-0.5
    interpreted = queries.device.type == "cpu"
    if layout.num_single:
        shape = (layout.num_single, num_heads, layout.num_pieces)
        partial = torch.empty((*shape, dim), dtype=torch.float32, device=queries.device)
        partial_lse = torch.empty(shape, dtype=torch.float32, device=queries.device)
        decode_kernel[(layout.num_single, kv_heads, layout.num_pieces)](
            queries,
            queries.stride(0),
            partial,
            partial_lse,
            *cache,
            paged.spans,
            paged.tables,
            paged.block_size,
            scale,
            layout.num_pieces,
            HEADS=num_heads,
            GROUP=group,
            M=_rows(group),
            BLOCK_N=BLOCK_TOKENS,
            PIECE=PIECE_TOKENS,
            D=dim,
            WIDE=interpreted,
        )
        merge_kernel[(layout.num_single, num_heads)](
            partial,
            partial_lse,
            out,
            paged.spans,
            layout.num_pieces,
            HEADS=num_heads,
            PIECE=PIECE_TOKENS,
            D=dim,
            num_warps=1,
        )
    if layout.tiles is not None:
        chunk_kernel[(len(layout.tiles), kv_heads)](
            queries,
            queries.stride(0),
            out,
            *cache,
            paged.spans,
            paged.tables,
            layout.tiles,
            paged.block_size,
            scale,
            HEADS=num_heads,
            GROUP=group,
            M=max(TILE_ROWS, _rows(group)),
            BLOCK_N=BLOCK_TOKENS,
            D=dim,
            WIDE=interpreted,
        )


def _rows(group: int) -> int:
    return max(MIN_ROWS, 1 << (group - 1).bit_length())
