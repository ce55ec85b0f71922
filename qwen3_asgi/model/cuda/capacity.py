"""How much of a card the KV pool may take, beside what others hold on it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from qwen3_asgi.errors import ModelLoadError
from qwen3_asgi.model.cuda.attention import PIECE_TOKENS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from qwen3_asgi.config import EngineConfig
    from qwen3_asgi.model.config import ModelConfig

GIB = 2**30

# Kernels, what libraries keep for themselves, graphs.
FIXED_BYTES = 512 * 2**20
# Of one logit on its way through sampling, when all of them have to be ranked: the float32 itself,
# an int64 key to sort by and its copies in the sort, and float64 weights and their sums.
SAMPLING_BYTES = 80


class CardMemory(NamedTuple):
    """Bytes of a card: of all processes together, and what this one's torch holds in vain."""

    free: int
    total: int
    reclaimable: int


def card_memory(device: torch.device) -> CardMemory:
    """Ask the driver. What the caching allocator keeps unused is not free for it, but is for us."""
    free, total = torch.cuda.mem_get_info(device)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return CardMemory(free, total, unused)


def pool_budget(memory: CardMemory, utilization: float, reserve_bytes: int) -> int:
    """Bytes for the KV pool. Called once the weights are on the card.

    `utilization` is the part of the whole card that may be in use when the engine runs, whoever
    uses it: a host application's own models, other processes and our weights all count. So an
    engine never takes what a neighbour holds, and a fixed part of the card stays free.

    Args:
        reserve_bytes: what steps need beside the pool, `step_bytes`.

    Raises:
        ModelLoadError: nothing is left.
    """
    limit = int(memory.total * utilization)
    used = memory.total - memory.free - memory.reclaimable
    budget = limit - used - reserve_bytes
    if budget <= 0:
        raise ModelLoadError(
            f"gpu_memory_utilization={utilization} allows {limit / GIB:.2f} of the card's "
            f"{memory.total / GIB:.2f} GiB; {used / GIB:.2f} GiB are in use, the model's weights "
            f"included, and steps need {reserve_bytes / GIB:.2f} GiB: nothing is left for the KV "
            "pool"
        )
    return budget


def step_bytes(
    config: ModelConfig, settings: EngineConfig, max_tokens: int, dtype: torch.dtype
) -> int:
    """What steps need beside weights and KV pool, with something to spare.

    That is the rows of one layer, for a step's prompt tokens and for its decode rows, the parts
    that attention merges, logits on their way through sampling, the table of rotations, and
    `FIXED_BYTES`.
    """
    heads = config.num_heads + 2 * config.num_kv_heads
    row = 4 * config.hidden_size + 3 * config.intermediate_size
    row += (heads + config.num_heads) * config.head_dim
    rows = (settings.max_prefill_tokens + settings.max_batch) * row * dtype.itemsize
    pieces = -(-max_tokens // PIECE_TOKENS)
    parts = settings.max_batch * config.num_heads * pieces * (config.head_dim + 1) * 4
    logits = settings.max_batch * config.vocab_size * SAMPLING_BYTES
    rotations = 2 * max_tokens * config.head_dim * 4
    return FIXED_BYTES + rows + parts + logits + rotations


def buckets(max_batch: int) -> Sequence[int]:
    """Batch sizes to capture: powers of two, and `max_batch` itself.

    Raises:
        ValueError: `max_batch` is below 1.
    """
    if max_batch < 1:
        raise ValueError(f"max_batch must be at least 1, got {max_batch}")
    powers = [1 << i for i in range(max_batch.bit_length()) if 1 << i < max_batch]
    return (*powers, max_batch)
