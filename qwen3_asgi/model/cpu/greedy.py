"""Greedy tokens in the compiled library: one pass, where torch's operators take five."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from qwen3_asgi.model.cpu.kernels import DTYPES
from qwen3_asgi.model.cpu.library import is_wide, kernel_library

if TYPE_CHECKING:
    import ctypes
    from collections.abc import Iterable

# As in greedy.h: what a row comes to in place of a token.
NO_TOKEN, NOT_FINITE = -1, -2


class CpuGreedy:
    """Chooses among `ids`, the lowest of equals."""

    def __init__(self, library: ctypes.CDLL, vocab_size: int, ids: Iterable[int]) -> None:
        self._library = library
        self._vocab_size = vocab_size
        stretches: list[list[int]] = []
        for each in sorted(set(ids)):
            if not 0 <= each < vocab_size:
                raise ValueError(f"id {each} is none of a vocabulary of {vocab_size}")
            if stretches and stretches[-1][1] == each:
                stretches[-1][1] += 1
            else:
                stretches.append([each, each + 1])
        self._stretches = torch.tensor(stretches, dtype=torch.int64).view(-1, 2)

    def __call__(self, logits: torch.Tensor) -> list[int]:
        """The token of each row of `logits` `[R, vocab]` in bf16 or float32, `NO_TOKEN` if there is
        nothing to choose from, `NOT_FINITE` if any logit is none."""
        if logits.ndim != 2 or logits.shape[1] != self._vocab_size or logits.dtype not in DTYPES:
            raise ValueError(
                f"logits are {tuple(logits.shape)} in {logits.dtype}, expected [R, "
                f"{self._vocab_size}] in bf16 or float32"
            )
        logits = logits.contiguous()
        tokens = torch.empty(len(logits), dtype=torch.int64)
        self._library.qwen3_greedy(
            *(is_wide(logits), logits.data_ptr(), self._stretches.data_ptr()),
            *(len(self._stretches), tokens.data_ptr(), *logits.shape, torch.get_num_threads()),
        )
        found: list[int] = tokens.tolist()
        return found


def cpu_greedy(vocab_size: int, ids: Iterable[int], device: torch.device) -> CpuGreedy | None:
    """What chooses on this device, or None where torch's operators have to do."""
    library = kernel_library()[0] if device.type == "cpu" else None
    return None if library is None else CpuGreedy(library, vocab_size, ids)
