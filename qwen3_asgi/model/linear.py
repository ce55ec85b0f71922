"""A linear layer without bias, whose weight is laid out for the CPU once, at load.

oneDNN reads a packed bf16 weight at the machine's full memory bandwidth; through `F.linear` the
same product runs at half of it, which is half the speed of decoding.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch.nn import functional

PACK_DTYPE = torch.bfloat16


class LinearLayer(Protocol):
    """A matrix `[out, in]`, its `shape`. Used by several threads at once."""

    @property
    def shape(self) -> tuple[int, int]: ...

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`x @ weight.T` for `x` `[T, in]` in the model's dtype; returns `[T, out]`."""
        ...


class Table(Protocol):
    """A matrix whose rows are looked up: the embedding `[vocab, hidden]`."""

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows `ids` (int64 `[T]`): `[T, hidden]`, the caller's own."""
        ...


class PlainTable:
    """A `Table` that is a tensor."""

    __slots__ = ("weight",)

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight

    @property
    def device(self) -> torch.device:
        return self.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.weight.dtype

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        return functional.embedding(ids, self.weight)


class Linear:
    """`y = x @ weight.T` for `x` `[T, in]` in the weight's dtype; returns `[T, out]`.

    Holds one copy of the weight: packed when the platform can (then the given tensor is not
    kept), else as it came.
    """

    __slots__ = ("_packed", "_weight", "shape")

    def __init__(self, weight: torch.Tensor) -> None:
        self.shape = (weight.shape[0], weight.shape[1])
        self._packed = pack_weight(weight)
        self._weight = weight if self._packed is None else None

    @property
    def is_packed(self) -> bool:
        return self._packed is not None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._packed is not None:
            return _packed_product(x, self._packed)
        assert self._weight is not None
        return functional.linear(x, self._weight)


def pack_weight(weight: torch.Tensor) -> torch.Tensor | None:
    """Return `weight` `[out, in]` in oneDNN's own layout, or None where that is of no use.

    None for other devices and dtypes, where the operators are missing (they are what torch's
    inductor emits, not public API), and where a trial product differs from `F.linear`.
    """
    if weight.device.type != "cpu" or weight.dtype != PACK_DTYPE:
        return None
    try:
        # The row count is a hint; the layout it gives is as fast for 512 rows as for one.
        packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, 1)
        probe = torch.linspace(-1, 1, 2 * weight.shape[1]).reshape(2, -1).to(weight.dtype)
        found = _packed_product(probe, packed)
    except (AttributeError, RuntimeError, NotImplementedError):
        return None
    expected = functional.linear(probe, weight)
    # Both sum in float32 and round once, so they differ by the last bit at most, plus what the
    # order of summation leaves when terms cancel.
    slack = 1e-2 * float(expected.abs().amax())
    if not torch.allclose(found, expected, rtol=1e-2, atol=slack, equal_nan=True):
        return None
    return packed


def _packed_product(x: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], None)
    return y
