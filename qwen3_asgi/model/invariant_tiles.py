"""Products in plain torch, always of the same number of rows: one kernel for every step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from qwen3_asgi.model.linear import Linear

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

# Every tile reads the whole weight, so prompts want many rows and lone decoding wants few.
TILE_ROWS = (32, 16, 8, 4, 1)


class Tiles:
    """A weight `[out, in]`. Rows of `x` are multiplied by the tile, the last one filled up.

    Tiles are made anew for each product, so that they begin at the same alignment.
    """

    __slots__ = ("_linear", "rows", "shape")

    def __init__(self, weight: Tensor) -> None:
        self.shape = (weight.shape[0], weight.shape[1])
        self._linear = Linear(weight)
        self.rows = tile_rows(self._linear, weight)

    def __call__(self, x: Tensor) -> Tensor:
        y = x.new_empty(len(x), self._linear.shape[0])
        for first in range(0, len(x), self.rows):
            part = x[first : first + self.rows]
            tile = x.new_zeros(self.rows, x.shape[1])
            tile[: len(part)] = part
            y[first : first + self.rows] = self._linear(tile)[: len(part)]
        return y


def tile_rows(product: Callable[[Tensor], Tensor], weight: Tensor) -> int:
    """The most rows of a tile in which a row's place changes no bit of its product with `weight`.

    Found out by trying: kernels may treat the last rows of a tile unlike the first. One row always
    has the same place.
    """
    generator = torch.Generator().manual_seed(0)
    row = torch.randn(weight.shape[1], generator=generator).to(weight)
    for count in TILE_ROWS:
        found = product(row.expand(count, -1).contiguous())
        # By their bits: a weight with a NaN in it has a place, too.
        bits = found.view(torch.uint8)
        if torch.equal(bits, bits[:1].expand(count, -1)):
            return count
    return 1
