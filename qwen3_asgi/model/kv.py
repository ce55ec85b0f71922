"""The KV pool: one key and one value tensor per layer, addressed by slots.

A slot holds one position: block b of size s owns slots `b*s … b*s+s-1`. Blocks that lie next to
each other are read as one view; only a badly scattered sequence is copied together to be read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from qwen3_asgi.model.config import ModelConfig


class Run(NamedTuple):
    """`length` consecutive slots from `start`, holding consecutive positions of one sequence."""

    start: int
    length: int


class Scattered(NamedTuple):
    """The first `length` positions held by int64 `blocks`, which are read by copying them."""

    blocks: torch.Tensor
    block_size: int
    length: int


Stretch = Run | Scattered

# Attending one more run costs as much as copying about this many tokens (measured in bf16 with 8 KV
# heads of 128: 25 microseconds for either), so shorter runs than this are copied together.
WORTHWHILE_RUN_TOKENS = 64


def stretches(
    block_table: Sequence[int], num_tokens: int, block_size: int, device: torch.device
) -> tuple[Stretch, ...]:
    """Return the cheapest way to read the first `num_tokens` positions."""
    found = runs(block_table, num_tokens, block_size)
    if len(found) <= 2 or num_tokens >= WORTHWHILE_RUN_TOKENS * len(found):
        return found
    held = list(block_table[: -(-num_tokens // block_size)])
    blocks = torch.tensor(held, dtype=torch.int64, device=device)
    return (Scattered(blocks, block_size, num_tokens),)


def runs(block_table: Sequence[int], num_tokens: int, block_size: int) -> tuple[Run, ...]:
    """Merge the blocks of the first `num_tokens` positions into as few runs as possible."""
    found: list[Run] = []
    for index in range(-(-num_tokens // block_size)):
        start = block_table[index] * block_size
        length = min(block_size, num_tokens - index * block_size)
        if found and found[-1].start + found[-1].length == start:
            found[-1] = Run(found[-1].start, found[-1].length + length)
        else:
            found.append(Run(start, length))
    return tuple(found)


class LayerKV(NamedTuple):
    """Keys and values of one layer, each `[kv_heads, slots, head_dim]`.

    Heads come first because a head's run is then one contiguous piece of memory, which bf16
    attention on the CPU reads a quarter faster than with the slots first.
    """

    keys: torch.Tensor
    values: torch.Tensor

    def write(self, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store keys and values `[T, kv_heads, head_dim]` at int64 `slots` `[T]`."""
        self.keys.index_copy_(1, slots, keys.transpose(0, 1))
        self.values.index_copy_(1, slots, values.transpose(0, 1))

    def read(self, stretch: Stretch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values, each `[1, kv_heads, stretch.length, head_dim]`.

        Those of a run are views.
        """
        if isinstance(stretch, Scattered):
            return _gather(self.keys, stretch), _gather(self.values, stretch)
        return (
            self.keys.narrow(1, stretch.start, stretch.length).unsqueeze(0),
            self.values.narrow(1, stretch.start, stretch.length).unsqueeze(0),
        )


def _gather(cache: torch.Tensor, stretch: Scattered) -> torch.Tensor:
    # By whole blocks: position by position it takes five times as long.
    heads, _, dim = cache.shape
    blocks = cache.view(heads, -1, stretch.block_size * dim).index_select(1, stretch.blocks)
    return blocks.view(1, heads, -1, dim)[:, :, : stretch.length]


class KVPool:
    """The tensors behind `num_blocks` blocks. Memory is touched only as blocks are written."""

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (config.num_kv_heads, num_blocks * block_size, config.head_dim)

        def allocate() -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        self.num_blocks = num_blocks
        self.block_size = block_size
        self.layers = tuple(LayerKV(allocate(), allocate()) for _ in range(config.num_layers))

    @property
    def bytes_per_block(self) -> int:
        return sum(cache.nbytes for layer in self.layers for cache in layer) // self.num_blocks

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy whole blocks; all are read before the first is written."""
        device = self.layers[0].keys.device
        out_of = torch.tensor(sources, dtype=torch.int64, device=device)
        into = torch.tensor(targets, dtype=torch.int64, device=device)
        for layer in self.layers:
            for cache in layer:
                blocks = cache.view(cache.shape[0], self.num_blocks, -1)
                blocks.index_copy_(1, into, blocks.index_select(1, out_of))


def bytes_per_block(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """Memory of one block over all layers."""
    values = 2 * config.num_layers * config.num_kv_heads * config.head_dim * block_size
    return values * dtype.itemsize
