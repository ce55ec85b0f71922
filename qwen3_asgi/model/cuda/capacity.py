"""How much of a card the KV pool may take, beside what others hold on it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

# Left free for the work of steps, cuBLAS and the CUDA graphs.
WORKSPACE_BYTES = 512 * 2**20


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


def pool_budget(
    memory: CardMemory, utilization: float, workspace_bytes: int = WORKSPACE_BYTES
) -> int:
    """Bytes for the KV pool; 0 if there is no room. Called once the weights are on the card.

    `utilization` is the part of the whole card that may be in use when the pool is there, whoever
    uses it: a host application's own models, other processes and our weights all count. So an
    engine never takes what a neighbour holds, and a fixed part of the card stays free.

    Raises:
        ValueError: `utilization` is not above 0 and at most 1.
    """
    if not 0 < utilization <= 1:
        raise ValueError(f"gpu_memory_utilization must be in (0, 1], got {utilization}")
    available = memory.free + memory.reclaimable
    kept_free = memory.total - int(memory.total * utilization)
    return max(0, available - max(kept_free, workspace_bytes))


def buckets(max_batch: int) -> Sequence[int]:
    """Batch sizes to capture: powers of two, and `max_batch` itself.

    Raises:
        ValueError: `max_batch` is below 1.
    """
    if max_batch < 1:
        raise ValueError(f"max_batch must be at least 1, got {max_batch}")
    powers = [1 << i for i in range(max_batch.bit_length()) if 1 << i < max_batch]
    return (*powers, max_batch)
