"""Sums over a vocabulary whose last bit does not depend on the number of threads.

torch gives each thread a part of a long sum. Here the parts are of one size instead, and so are
summed alike by however many threads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from torch import Tensor

# torch shares sums among threads from 32,768 numbers on: the parts, and their number, are fewer.
PART = 1024


def total_of(x: Tensor) -> Tensor:
    """The sum of `x` `[n]`."""
    return functional.pad(x, (0, -len(x) % PART)).view(-1, PART).sum(1).sum()


def log_sum_exp(x: Tensor) -> Tensor:
    """`log(sum(exp(x)))` of finite `x` `[n]`."""
    best = x.max()
    return best + torch.log(total_of(torch.exp(x - best)))
