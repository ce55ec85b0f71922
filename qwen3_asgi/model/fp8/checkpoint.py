"""A checkpoint of which matrices are stored as float8 blocks, the way Hugging Face lays it out.

`X.weight` in float8_e4m3fn stands beside `X.weight_scale_inv`, with which it is multiplied: the
name is the inverse of what the values were multiplied with when they were made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from qwen3_asgi.model.checkpoint import STORED_FLOAT8, Checkpoint
from qwen3_asgi.model.fp8.blocks import Blocks, scales_shape

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence
    from pathlib import Path

    from qwen3_asgi.model.config import ModelConfig

SCALES_SUFFIX = "_scale_inv"
# Embeddings and norms are looked up and multiplied elementwise: no scale is applied there.
MATRIX_NAMES = ("_proj.weight", "lm_head.weight")


def open_checkpoint(folder: Path, config: ModelConfig) -> Checkpoint:
    """Open the files of `folder` as its `config.json` says they are to be read.

    Raises:
        ModelLoadError: a file is missing, damaged, or not safetensors.
    """
    return Fp8Checkpoint(folder) if config.fp8 else Checkpoint(folder)


class Fp8Checkpoint(Checkpoint):
    """A `Checkpoint` in which any of the matrices may be float8 blocks; the others are as usual."""

    def check(self, shapes: Mapping[str, Sequence[int]], ignored: Collection[str] = ()) -> None:
        """As `Checkpoint.check`; each float8 matrix must have its scales, and no other tensor.

        Raises:
            ModelLoadError: names the file, the tensor, and what was expected and found.
        """
        scales = {
            name + SCALES_SUFFIX: scales_shape(*shape)
            for name, shape in shapes.items()
            if self.has_blocks(name)
        }
        ignored = (*ignored, *(name + SCALES_SUFFIX for name in ignored))
        super().check({**shapes, **scales}, ignored)

    def has_blocks(self, name: str) -> bool:
        """Whether tensor `name` is there and stored as float8 blocks."""
        return name.endswith(MATRIX_NAMES) and self.stored_type(name) == STORED_FLOAT8

    def blocks(self, name: str) -> Blocks:
        """Read a matrix that `has_blocks`; it may share memory with the file, see `read`."""
        values = super().read(name)
        return Blocks(values, super().read(name + SCALES_SUFFIX).to(torch.float32))

    def read(self, name: str) -> torch.Tensor:
        """Read one tensor; float8 blocks are multiplied out, to float32."""
        if self.has_blocks(name):
            return self.blocks(name).dequantize(torch.float32)
        return super().read(name)

    def dtype_name(self, name: str) -> str:
        """As `Checkpoint.dtype_name`, or "float8_e4m3fn"."""
        return "float8_e4m3fn" if self.has_blocks(name) else super().dtype_name(name)
