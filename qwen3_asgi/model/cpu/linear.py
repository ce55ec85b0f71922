"""Linear layers in the compiled kernels: weights as they are, or in 8 bits.

A row's result depends on that row only: not on how many rows there are, nor on the threads.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch

from qwen3_asgi.model.cpu.kernels import DTYPES, WIDTH_MULTIPLE
from qwen3_asgi.model.cpu.library import NO_ROW, check, is_wide, kernel_library

if TYPE_CHECKING:
    from qwen3_asgi.model.cpu.arena import Arena


class Matrix(ctypes.Structure):
    """`Matrix` of layers.h: where a layer here keeps its weight. Holds nothing."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("panels", "scales", "sums")),
        *((name, ctypes.c_int64) for name in ("columns", "depth")),
    )


class PanelLinear:
    """A `LinearLayer` in bf16 or float32. Holds a copy of `weight` `[out, in]` in panels of
    columns, as `linear.h` reads them, which serves as the `Table` of a tied embedding, too."""

    __slots__ = ("_library", "_panels", "shape")

    def __init__(
        self, library: ctypes.CDLL, weight: torch.Tensor, arena: Arena | None = None
    ) -> None:
        weight = weight.contiguous()
        self.shape = (weight.shape[0], weight.shape[1])
        self._library = library
        self._panels = _empty(arena, _whole_panels(library, weight), weight.dtype)
        library.qwen3_pack(
            *(is_wide(weight), weight.data_ptr(), self._panels.data_ptr()),
            *(*self.shape, torch.get_num_threads()),
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        x = _checked(x, self.shape[1], self._panels.dtype)
        y = x.new_empty((len(x), self.shape[0]))
        status = self._library.qwen3_linear(
            *(is_wide(x), x.data_ptr(), self._panels.data_ptr(), y.data_ptr()),
            *(len(x), *self.shape, torch.get_num_threads()),
        )
        check(status)
        return y

    @property
    def matrix(self) -> Matrix:
        return Matrix(self._panels.data_ptr(), None, None, *self.shape)

    @property
    def device(self) -> torch.device:
        return self._panels.device

    @property
    def dtype(self) -> torch.dtype:
        return self._panels.dtype

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Return rows `ids` (int64 `[T]`) of the weight, bit for bit: `[T, in]`.

        Raises:
            IndexError: an id is not a row of the weight.
        """
        ids = ids.to(torch.int64).contiguous()
        out = self._panels.new_empty((len(ids), self.shape[1]))
        status = self._library.qwen3_rows(
            *(is_wide(out), self._panels.data_ptr(), ids.data_ptr(), out.data_ptr()),
            *(len(ids), *self.shape, torch.get_num_threads()),
        )
        if status == NO_ROW:
            raise IndexError(f"rows are 0 to {self.shape[0] - 1}")
        return out


class Int8Linear:
    """A `LinearLayer` whose weights are 8 bits with a float32 scale per output, see `int8.h`.

    `weight` `[out, in]` in bf16 or float32 is not kept; a column's highest weight becomes 127.
    """

    __slots__ = ("_dtype", "_library", "_panels", "_scales", "_sums", "shape")

    def __init__(
        self, library: ctypes.CDLL, weight: torch.Tensor, arena: Arena | None = None
    ) -> None:
        weight = weight.contiguous()
        self.shape = (weight.shape[0], weight.shape[1])
        self._dtype = weight.dtype
        self._library = library
        values = _whole_panels(library, weight)
        self._panels = _empty(arena, values, torch.int8)
        self._scales = torch.empty(values // self.shape[1], dtype=torch.float32)
        self._sums = torch.empty(values // self.shape[1], dtype=torch.int32)
        library.qwen3_pack_int8(
            *(is_wide(weight), weight.data_ptr(), self._panels.data_ptr()),
            *(self._scales.data_ptr(), self._sums.data_ptr()),
            *(*self.shape, torch.get_num_threads()),
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        x = _checked(x, self.shape[1], self._dtype)
        y = x.new_empty((len(x), self.shape[0]))
        status = self._library.qwen3_int8_linear(
            *(is_wide(x), x.data_ptr(), self._panels.data_ptr()),
            *(self._scales.data_ptr(), self._sums.data_ptr(), y.data_ptr()),
            *(len(x), *self.shape, torch.get_num_threads()),
        )
        check(status)
        return y

    @property
    def matrix(self) -> Matrix:
        addresses = (each.data_ptr() for each in (self._panels, self._scales, self._sums))
        return Matrix(*addresses, *self.shape)


def panel_linear(weight: torch.Tensor, arena: Arena | None = None) -> PanelLinear | None:
    """`weight` in panels, or None where there are no kernels for it."""
    library = _library_for(weight)
    return None if library is None else PanelLinear(library, weight, arena)


def int8_linear(weight: torch.Tensor, arena: Arena | None = None) -> Int8Linear | None:
    """`weight` in 8 bits, or None where there are no kernels for it."""
    library = _library_for(weight)
    if library is None or not library.qwen3_has_int8():
        return None
    return Int8Linear(library, weight, arena)


def _library_for(weight: torch.Tensor) -> ctypes.CDLL | None:
    if weight.device.type != "cpu" or weight.dtype not in DTYPES:
        return None
    if weight.shape[1] % WIDTH_MULTIPLE:
        return None
    return kernel_library()[0]


def _empty(arena: Arena | None, count: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(count, dtype=dtype) if arena is None else arena.empty(count, dtype)


def _whole_panels(library: ctypes.CDLL, weight: torch.Tensor) -> int:
    """How many values the panels of a weight hold: the last one is filled up."""
    panel: int = library.qwen3_panel()
    return -(-weight.shape[0] // panel) * panel * weight.shape[1]


def _checked(x: torch.Tensor, depth: int, dtype: torch.dtype) -> torch.Tensor:
    """The kernels go by addresses: what does not fit must not reach them."""
    if x.ndim != 2 or x.shape[1] != depth or x.dtype != dtype:
        raise ValueError(f"x is {tuple(x.shape)} in {x.dtype}, expected [T, {depth}] in {dtype}")
    return x.contiguous()
