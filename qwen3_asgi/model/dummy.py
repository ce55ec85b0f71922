"""Random weights in a model's shape, for measuring without a download. Read like a checkpoint."""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING

import torch

from qwen3_asgi.model.weights import EMBEDDING, LM_HEAD, tensor_shapes

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from qwen3_asgi.model.config import ModelConfig

# A prime: however wide a matrix is, its rows start at different places, so none is repeated.
POOL_SIZE = 16_777_213
SEED = 20_250_428
LOGIT_SPREAD = 2.0


class DummyCheckpoint:
    """Takes a `Checkpoint`'s place. The same values for the same `config` on every device.

    Normally distributed values, drawn once and then copied at the speed of memory, from another
    place for each tensor: drawing all of them would take a minute and more for the larger models.

    Scaled so that every product keeps the size of its input (He et al. 2015, arXiv:1502.01852,
    without the factor for the activation), norms are 1, and logits have a standard deviation of
    about `LOGIT_SPREAD`.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        self._shapes = tensor_shapes(config)
        self._dtype = dtype
        self._device = device
        generator = torch.Generator().manual_seed(SEED)
        largest = max(torch.Size(shape).numel() for shape in self._shapes.values())
        pool = torch.randn(min(POOL_SIZE, largest), generator=generator)
        self._pool = pool.to(device)

    @property
    def file_names(self) -> list[str]:
        return []

    def check(self, shapes: Mapping[str, Sequence[int]], ignored: Collection[str] = ()) -> None:
        """Nothing can be missing."""

    def read(self, name: str) -> torch.Tensor:
        """Return a new tensor in the model's dtype on its device."""
        shape = self._shapes[name]
        tensor = torch.empty(shape, dtype=self._dtype, device=self._device)
        if len(shape) == 1:
            return tensor.fill_(1)
        scale = shape[1] ** -0.5
        if name in (EMBEDDING, LM_HEAD):
            scale *= LOGIT_SPREAD
        flat = tensor.view(-1)
        done, start = 0, self._start(name)
        while done < len(flat):
            size = min(len(flat) - done, len(self._pool) - start)
            target = flat[done : done + size]
            target.copy_(self._pool[start : start + size]).mul_(scale)
            done, start = done + size, 0
        return tensor

    def _start(self, name: str) -> int:
        digest = blake2b(name.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") % len(self._pool)
