"""A real pool and real tiers on the CPU, whose copy thread a test can hold back."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest
import torch

from qwen3_asgi.model.config import ModelConfig
from qwen3_asgi.model.kv import KVPool
from qwen3_asgi.model.kv_file import FileLayout, KVFile
from qwen3_asgi.model.rope_config import RopeConfig
from qwen3_asgi.model.tiers import TorchTiers
from qwen3_asgi.scheduler.blocks import CachedBlock
from qwen3_asgi.scheduler.executor import Copy, Place
from qwen3_asgi.scheduler.prefix import block_digest

if TYPE_CHECKING:
    from pathlib import Path

BLOCK_SIZE = 4
PATIENCE_SECONDS = 60.0
DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.cuda,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
        ],
    ),
]
SHAPE = ModelConfig(
    vocab_size=10,
    hidden_size=8,
    intermediate_size=8,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=5,
    rms_norm_eps=1e-6,
    max_position_embeddings=64,
    tie_word_embeddings=True,
    rope=RopeConfig(1e4),
    dtype=None,
    eos_token_ids=(),
)


class Gate:
    """Holds the copy thread before each piece: open, or letting so many pieces pass."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._permits = 0
        self._open = True
        self._arrived = 0

    def set_open(self, open_: bool) -> None:
        with self._changed:
            self._open = open_
            self._changed.notify_all()

    def let(self, count: int) -> None:
        with self._changed:
            self._permits += count
            self._changed.notify_all()

    def wait_for_arrivals(self, count: int) -> None:
        """Until so many pieces have come here since the beginning."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._arrived >= count, PATIENCE_SECONDS)

    def pass_through(self) -> None:
        with self._changed:
            self._arrived += 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._open or self._permits, PATIENCE_SECONDS)
            if not self._open:
                self._permits -= 1


class GatedTiers(TorchTiers):
    """Notes what is copied, in which order, behind a gate that steps open when they must."""

    def __init__(self, pool, num_host_slots, file):
        self.gate = Gate()
        self.copied: list[tuple[str, str, int]] = []
        self.broken: set[Place] = set()
        self.landed_once = threading.Condition()
        self.ended = {}
        super().__init__(pool, num_host_slots, file)
        self.wake = self.note_landing

    def _copy(self, piece):
        self.gate.pass_through()
        copy = piece.copies[0]
        self.copied.append((copy.source.level, copy.target.level, piece.batch.ticket))
        if self.broken & {place for copy in piece.copies for place in copy[:2]}:
            raise RuntimeError("broken on purpose")
        return super()._copy(piece)

    def before_step(self):
        if self._stores_read == self._stores_begun:
            super().before_step()
            return
        self.gate.set_open(True)
        super().before_step()
        self.gate.set_open(False)

    def close(self):
        self.gate.set_open(True)
        super().close()

    def note_landing(self):
        with self.landed_once:
            self.landed_once.notify_all()

    def wait(self, *tickets):
        """Until these have landed; returns what failed of the last one."""
        with self.landed_once:
            while not set(tickets) <= set(self.ended):
                for end in self.landed():
                    assert end.ticket not in self.ended
                    self.ended[end.ticket] = dict(end.failed)
                if not set(tickets) <= set(self.ended):
                    assert self.landed_once.wait(PATIENCE_SECONDS), "nothing lands"
        return self.ended[tickets[-1]]


class World:
    """`blocks` device blocks of `dtype`, with tiers of these sizes below."""

    def __init__(
        self,
        *,
        blocks: int = 12,
        host_slots: int = 0,
        path: Path | None = None,
        file_slots: int = 8,
        dtype: torch.dtype = torch.bfloat16,
        fingerprint: str = "one",
        device: str = "cpu",
    ) -> None:
        self.pool = KVPool(SHAPE, blocks, BLOCK_SIZE, dtype, torch.device(device))
        file = None
        if path is not None:
            file = KVFile(str(path), layout(self.pool, file_slots, fingerprint))
        self.tiers = GatedTiers(self.pool, host_slots, file)

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: object) -> None:
        self.tiers.close()

    @property
    def caches(self) -> list[torch.Tensor]:
        """Every tensor of the pool, by block: `[kv_heads, blocks, width]`."""
        return [
            cache.view(cache.shape[0], self.pool.num_blocks, -1)
            for layer in self.pool.layers
            for cache in layer
        ]

    def fill(self, block: int, seed: int) -> bytes:
        """Random bytes in a block, as a step would write them; returns them."""
        source = torch.Generator().manual_seed(seed)
        for cache in self.caches:
            shape = (*cache[:, block].shape, cache.itemsize)
            noise = torch.randint(0, 256, shape, dtype=torch.uint8, generator=source)
            cache[:, block] = noise.view(cache.dtype).squeeze(-1).to(cache.device)
        self.tiers.after_step()
        return self.held(block)

    def held(self, block: int) -> bytes:
        parts = [cache[:, block].contiguous().cpu().view(torch.uint8) for cache in self.caches]
        return b"".join(part.numpy().tobytes() for part in parts)


def layout(pool: KVPool, slots: int, fingerprint: str = "one") -> FileLayout:
    return FileLayout(
        layers=SHAPE.num_layers,
        kv_heads=SHAPE.num_kv_heads,
        head_dim=SHAPE.head_dim,
        block_size=pool.block_size,
        dtype=str(pool.layers[0].keys.dtype),
        data_bytes=pool.bytes_per_block,
        slots=slots,
        fingerprint=fingerprint,
    )


def content(number: int, parent: bytes = bytes(16)) -> CachedBlock:
    """A block's tokens and address; another one for each number."""
    tokens = tuple(range(number, number + BLOCK_SIZE))
    return CachedBlock(block_digest(parent, tokens), parent, tokens)


def copy(source: str, target: str, number: int = 0) -> Copy:
    """`copy("device 3", "host 1")`."""
    return Copy(_place(source), _place(target), content(number))


def _place(text: str) -> Place:
    level, slot = text.split()
    return Place(level, int(slot))
