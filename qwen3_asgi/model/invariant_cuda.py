"""Products on CUDA by one Triton kernel, which never cuts the depth and never changes its tiles."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

# Other tiles may mean other instructions, whose sums are grouped otherwise.
BLOCK_ROWS = 64
BLOCK_COLUMNS = 64
BLOCK_DEPTH = 64


class Programs:
    """A weight `[out, in]` on CUDA, or anywhere when Triton's interpreter runs the kernel."""

    __slots__ = ("_weight", "shape")

    def __init__(self, weight: Tensor) -> None:
        self.shape = (weight.shape[0], weight.shape[1])
        self._weight = weight.contiguous()

    def __call__(self, x: Tensor) -> Tensor:
        from qwen3_asgi.model.cuda.kernels.linear import linear_kernel

        x = x.contiguous()
        columns, depth = self.shape
        y = x.new_empty(len(x), columns)
        grid = (-(-columns // BLOCK_COLUMNS), -(-len(x) // BLOCK_ROWS))
        linear_kernel[grid](
            x,
            self._weight,
            y,
            len(x),
            columns,
            depth,
            BLOCK_M=BLOCK_ROWS,
            BLOCK_N=BLOCK_COLUMNS,
            BLOCK_K=BLOCK_DEPTH,
            WIDE=x.device.type == "cpu",
        )
        return y
