"""The compiled library of this process, with its functions' arguments declared."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import TYPE_CHECKING

import torch

from qwen3_asgi.model.cpu.build import BuildError, cache_folder, load_library

if TYPE_CHECKING:
    from torch import Tensor

_ADDRESS, _SIZE, _FLAG = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
# As in kernels.cpp. `wide` and the number of threads are flags of an int.
_ARGUMENTS: dict[str, tuple[type, ...]] = {
    "qwen3_attention": (_ADDRESS, _FLAG, *[_ADDRESS] * 5),
    "qwen3_layers": (_ADDRESS, _FLAG, _ADDRESS, _SIZE, *[_ADDRESS] * 4, _SIZE, _ADDRESS),
    "qwen3_add_norm": (_FLAG, *[_ADDRESS] * 4, _SIZE, _SIZE, ctypes.c_double, _FLAG),
    "qwen3_silu_mul": (_FLAG, *[_ADDRESS] * 2, _SIZE, _SIZE, _FLAG),
    "qwen3_greedy": (_FLAG, _ADDRESS, _ADDRESS, _SIZE, _ADDRESS, _SIZE, _SIZE, _FLAG),
    "qwen3_panel": (),
    "qwen3_has_int8": (),
    "qwen3_pack": (_FLAG, *[_ADDRESS] * 2, _SIZE, _SIZE, _FLAG),
    "qwen3_rows": (_FLAG, *[_ADDRESS] * 3, *[_SIZE] * 3, _FLAG),
    "qwen3_linear": (_FLAG, *[_ADDRESS] * 3, *[_SIZE] * 3, _FLAG),
    "qwen3_pack_int8": (_FLAG, *[_ADDRESS] * 4, _SIZE, _SIZE, _FLAG),
    "qwen3_int8_linear": (_FLAG, *[_ADDRESS] * 5, *[_SIZE] * 3, _FLAG),
}
_RETURN_INT = (*("qwen3_attention", "qwen3_layers", "qwen3_rows", "qwen3_panel", "qwen3_has_int8"),)


_NO_MEMORY, NO_ROW = 2, 3


@cache
def kernel_library() -> tuple[ctypes.CDLL | None, str]:
    """The library, or None and why there is none; never raises.

    Once per process: a failing compiler is not asked again for every engine.
    """
    try:
        library = load_library(cache_folder())
        for name, arguments in _ARGUMENTS.items():
            function = getattr(library, name)
            function.argtypes = arguments
            function.restype = ctypes.c_int if name in _RETURN_INT else None
    except (BuildError, AttributeError) as error:  # the latter: a damaged file
        return None, str(error)
    return library, ""


def check(status: int) -> None:
    """Look at what a function that may fail has returned.

    Raises:
        MemoryError: the system has no more for intermediate results; nothing was computed.
        RuntimeError: there is no kernel for what was asked.
    """
    if status == _NO_MEMORY:
        raise MemoryError("no memory for the intermediate results of a step")
    if status:
        raise RuntimeError("the kernels of this machine cannot do that")


def is_wide(x: Tensor) -> bool:
    """Whether the functions are told that values are float32; else they are bf16."""
    return x.dtype == torch.float32
