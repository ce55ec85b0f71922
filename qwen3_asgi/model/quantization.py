"""Which linear layers a model gets: by device, dtype and `EngineConfig.quantization`."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from qwen3_asgi.errors import ModelLoadError
from qwen3_asgi.model.cpu.arena import Arena
from qwen3_asgi.model.cpu.linear import int8_linear, panel_linear
from qwen3_asgi.model.invariant import invariant_linear
from qwen3_asgi.model.linear import Linear

if TYPE_CHECKING:
    from collections.abc import Callable

    from qwen3_asgi.model.linear import LinearLayer


class PlainInt8Linear:
    """A `LinearLayer` of 8-bit weights in plain torch, where there is no kernel: it saves memory,
    and no time. The same weights as those of `cpu.linear.Int8Linear`."""

    __slots__ = ("_scales", "_values", "shape")

    def __init__(self, weight: torch.Tensor) -> None:
        self.shape = (weight.shape[0], weight.shape[1])
        self._values, self._scales = quantize_int8(weight)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        product = functional.linear(x, self._values.to(x.dtype))
        return (product.float() * self._scales).to(x.dtype)


def quantize_int8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return int8 `[out, in]` and float32 scales `[out]`: the highest weight of a row is 127."""
    wide = weight.float()
    scales = wide.abs().amax(dim=1) / 127
    steps = torch.where(scales > 0, 1 / scales, 0)
    return (wide * steps.unsqueeze(1)).round_().to(torch.int8), scales


def choose_linear(
    quantization: str | None, device: torch.device, *, invariant: bool = False
) -> Callable[[torch.Tensor], LinearLayer]:
    """What makes a layer of a weight `[out, in]`, which it may keep or copy. One thread's.

    With `invariant` a row's result must not depend on the other rows.

    Raises:
        ModelLoadError: a quantization that the device has no layers for. What is returned raises
            it, too, where a weight is in the way.
    """
    if quantization is None:
        if invariant:
            return partial(invariant_linear, arena=Arena())
        return partial(_fastest, arena=Arena()) if device.type == "cpu" else Linear
    if device.type != "cpu":
        raise ModelLoadError(
            f"quantization={quantization!r} runs on the CPU only, the device is {device}; leave it "
            f"unset there, or load a checkpoint in fp8"
        )
    return partial(_invariant_int8 if invariant else _int8, arena=Arena())


def _fastest(weight: torch.Tensor, arena: Arena) -> LinearLayer:
    return panel_linear(weight, arena) or Linear(weight)


def _int8(weight: torch.Tensor, arena: Arena) -> LinearLayer:
    return int8_linear(weight, arena) or PlainInt8Linear(weight)


def _invariant_int8(weight: torch.Tensor, arena: Arena) -> LinearLayer:
    layer = int8_linear(weight, arena)
    if layer is None:
        raise ModelLoadError(
            "batch_invariant=True with quantization='int8' needs the compiled kernels and a CPU "
            "with AVX-512 VNNI"
        )
    return layer
