"""Attention over paged keys and values, with the group's query heads as rows of one product.

Softmax is computed in one pass over the keys (Milakov and Gimelshein 2018, arXiv:1805.02867) in
tiles (Dao et al. 2022, arXiv:2205.14135). A single query row has its keys cut in pieces of fixed
length that run side by side and are merged by their log-sum-exp ("Flash-Decoding"): the pieces
depend on the sequence alone, so the result does not depend on the batch.
"""

import triton
import triton.language as tl


@triton.jit
def _attend(
    queries,  # [M, D]
    last,  # [M]: highest position each row may see; -1 for rows that are no rows
    begin,
    end,
    keys,  # at the KV head
    values,
    kv_slot_stride,
    kv_dim_stride,
    table,
    block_size,
    scale,
    M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    D: tl.constexpr,
    WIDE: tl.constexpr,  # multiply in float32: the interpreter cannot in bfloat16
):
    """Positions `begin … end-1`: returns the maximum, the sum of weights, the weighted values."""
    dims = tl.arange(0, D)
    if WIDE:
        queries = queries.to(tl.float32)
    best = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    mixed = tl.zeros([M, D], tl.float32)
    for first in range(begin, end, BLOCK_N):
        position = first + tl.arange(0, BLOCK_N)
        inside = position < end
        block = tl.load(table + position // block_size, mask=inside, other=0)
        slot = block.to(tl.int64) * block_size + position % block_size
        at = slot[:, None] * kv_slot_stride + dims[None, :] * kv_dim_stride
        # Slots that were never written may hold NaN, and 0 * NaN is NaN: they are not read.
        k = tl.load(keys + at, mask=inside[:, None], other=0.0)
        v = tl.load(values + at, mask=inside[:, None], other=0.0)
        p_dtype = v.dtype
        if WIDE:
            k = k.to(tl.float32)
            v = v.to(tl.float32)
        logits = tl.dot(queries, tl.trans(k), input_precision="ieee") * scale
        seen = inside[None, :] & (position[None, :] <= last[:, None])
        logits = tl.where(seen, logits, float("-inf"))
        new_best = tl.maximum(best, tl.max(logits, axis=1))
        # A row that has seen nothing yet: -inf minus -inf would be NaN.
        base = tl.where(new_best == float("-inf"), 0.0, new_best)
        shrink = tl.exp(best - base)
        weights = tl.exp(logits - base[:, None])
        total = total * shrink + tl.sum(weights, axis=1)
        part = tl.dot(weights.to(p_dtype).to(v.dtype), v, input_precision="ieee")
        mixed = mixed * shrink[:, None] + part
        best = new_best
    return best, total, mixed


@triton.jit
def chunk_kernel(
    queries,
    query_stride,
    out,
    keys,
    values,
    kv_head_stride,
    kv_slot_stride,
    kv_dim_stride,
    spans,
    tables,
    tiles,
    block_size,
    scale,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    D: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Program (tile, KV head): `M // GROUP` tokens of one sequence, each with its group's heads."""
    tile = tl.program_id(0)
    kv_head = tl.program_id(1).to(tl.int64)
    span = spans + tl.load(tiles + 2 * tile) * 4
    skipped = tl.load(tiles + 2 * tile + 1)
    first = tl.load(span)
    length = tl.load(span + 1)
    start = tl.load(span + 2)
    table = tables + tl.load(span + 3)
    TOKENS: tl.constexpr = M // GROUP
    row = tl.arange(0, M)
    token = skipped + row // GROUP
    real = (row < TOKENS * GROUP) & (token < length)
    head = kv_head * GROUP + row % GROUP
    dims = tl.arange(0, D)
    at = (first + token)[:, None] * query_stride + head[:, None] * D + dims[None, :]
    q = tl.load(queries + at, mask=real[:, None], other=0.0)
    last = tl.where(real, start + token, -1)
    end = start + tl.minimum(skipped + TOKENS, length)
    _, total, mixed = _attend(
        q,
        last,
        0,
        end,
        keys + kv_head * kv_head_stride,
        values + kv_head * kv_head_stride,
        kv_slot_stride,
        kv_dim_stride,
        table,
        block_size,
        scale,
        M,
        BLOCK_N,
        D,
        WIDE,
    )
    result = mixed / tl.where(total > 0, total, 1.0)[:, None]
    target = ((first + token) * HEADS + head)[:, None] * D + dims[None, :]
    tl.store(out + target, result.to(out.dtype.element_ty), mask=real[:, None])


@triton.jit
def decode_kernel(
    queries,
    query_stride,
    partial,
    partial_lse,
    keys,
    values,
    kv_head_stride,
    kv_slot_stride,
    kv_dim_stride,
    spans,
    tables,
    block_size,
    scale,
    num_pieces,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PIECE: tl.constexpr,
    D: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Program (row, KV head, piece): `PIECE` positions against one token's group of heads."""
    row = tl.program_id(0)
    kv_head = tl.program_id(1).to(tl.int64)
    piece = tl.program_id(2)
    span = spans + row * 4
    first = tl.load(span)
    held = tl.load(span + 2) + 1
    begin = piece * PIECE
    if begin < held:
        member = tl.arange(0, M)
        real = member < GROUP
        head = kv_head * GROUP + member
        dims = tl.arange(0, D)
        at = first * query_stride + head[:, None] * D + dims[None, :]
        q = tl.load(queries + at, mask=real[:, None], other=0.0)
        last = tl.where(real, held - 1, -1)
        best, total, mixed = _attend(
            q,
            last,
            begin,
            tl.minimum(begin + PIECE, held),
            keys + kv_head * kv_head_stride,
            values + kv_head * kv_head_stride,
            kv_slot_stride,
            kv_dim_stride,
            tables + tl.load(span + 3),
            block_size,
            scale,
            M,
            BLOCK_N,
            D,
            WIDE,
        )
        safe = tl.where(real, total, 1.0)
        target = (row.to(tl.int64) * HEADS + head) * num_pieces + piece
        tl.store(
            partial + target[:, None] * D + dims[None, :],
            mixed / safe[:, None],
            mask=real[:, None],
        )
        tl.store(partial_lse + target, best + tl.log(safe), mask=real)


@triton.jit
def merge_kernel(
    partial,
    partial_lse,
    out,
    spans,
    num_pieces,
    HEADS: tl.constexpr,
    PIECE: tl.constexpr,
    D: tl.constexpr,
):
    """Program (row, head): the mean of its pieces, in order, weighted by `exp(lse)`."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    first = tl.load(spans + row * 4)
    held = tl.load(spans + row * 4 + 2) + 1
    dims = tl.arange(0, D)
    source = (row * HEADS + head) * num_pieces
    best = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    mixed = tl.zeros([D], tl.float32)
    for piece in range(0, (held + PIECE - 1) // PIECE):
        lse = tl.load(partial_lse + source + piece)
        new_best = tl.maximum(best, lse)
        shrink = tl.exp(best - new_best)
        weight = tl.exp(lse - new_best)
        total = total * shrink + weight
        mixed = mixed * shrink + weight * tl.load(partial + (source + piece) * D + dims)
        best = new_best
    result = mixed / tl.where(total > 0, total, 1.0)
    tl.store(out + (first * HEADS + head) * D + dims, result.to(out.dtype.element_ty))
