"""Random batches over scattered blocks, and what the kernels must give for them."""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest
import torch

from qwen3_asgi.model.attention import reference_attention
from qwen3_asgi.model.batch import build_batch
from qwen3_asgi.model.kv import LayerKV
from qwen3_asgi.scheduler.plan import RequestId, Row

needs_kernels = pytest.mark.skipif(
    find_spec("triton") is None
    or not (torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1"),
    reason="no triton here, or neither a CUDA device nor TRITON_INTERPRET=1",
)
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 4e-2, torch.float16: 3e-3}


def random(*shape, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


def close(found, wanted):
    """Within rounding of the dtype."""
    tolerance = TOLERANCE[wanted.dtype]
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


def sequences(spans, block_size, *, seed=0, spare=3):
    """Rows (start, length) over blocks in random order, and the number of blocks."""
    counts = [-(-(start + length) // block_size) for start, length in spans]
    num_blocks = sum(counts) + spare
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(seed)).tolist()
    rows = []
    for i, ((start, length), count) in enumerate(zip(spans, counts, strict=True)):
        table, order = order[:count], order[count:]
        kind = "decode" if length == 1 else "prefill"
        rows.append(Row(RequestId(f"r{i}"), kind, [1] * length, start, table, None))
    return rows, num_blocks


def batch_of(rows, num_blocks, block_size, *, paged=True):
    return build_batch(
        rows,
        vocab_size=8,
        block_size=block_size,
        num_blocks=num_blocks,
        max_tokens=100_000,
        device=DEVICE,
        paged=paged,
    )


def random_kv(kv_heads, slots, dim, dtype, *, slots_first=False):
    """A pool's layer in either order of dimensions."""
    if slots_first:
        keys, values = (random(slots, kv_heads, dim, dtype=dtype, seed=s) for s in (1, 2))
        return LayerKV(keys.transpose(0, 1), values.transpose(0, 1))
    return LayerKV(*(random(kv_heads, slots, dim, dtype=dtype, seed=s) for s in (1, 2)))


def expected_attention(queries, kv, rows, block_size):
    """Attention `[T, N, D]` row by row in plain operations, keys repeated for their group."""
    outs, first = [], 0
    for row in rows:
        length, end = len(row.token_ids), row.start + len(row.token_ids)
        slots = [row.block_table[p // block_size] * block_size + p % block_size for p in range(end)]
        group = queries.shape[1] // kv.keys.shape[0]
        keys, values = (c[:, slots].repeat_interleave(group, dim=0).unsqueeze(0) for c in kv)
        q = queries[first : first + length].transpose(0, 1).unsqueeze(0)
        for i in range(length):
            seen = row.start + i + 1
            part = reference_attention(
                q[:, :, i : i + 1], keys[:, :, :seen], values[:, :, :seen], causal=False
            )
            outs.append(part.out[0, :, 0])
        first += length
    return torch.stack(outs)
