"""Collects examples of like length into batches of few distinct shapes.

A new shape costs the CPU kernels a set-up as long as a training step, so widths are rounded up.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from .rendering import Example, Rendering
    from .sample import Sample

_AT_ONCE = 256
_WIDTH_STEP = 16
_TARGETS_STEP = 128
LONGEST_TOKENS = 640
IGNORED = -100


class Batch(NamedTuple):
    ids: torch.Tensor
    places: torch.Tensor
    """Flat positions whose next token is learned."""
    targets: torch.Tensor
    """The tokens to predict there, or `IGNORED`."""


def batches(stream: Iterable[Sample], rendering: Rendering, batch_tokens: int) -> Iterator[Batch]:
    """Fills one shelf per width and yields it when full; examples that are too long are dropped."""
    source = iter(stream)
    shelves: dict[int, list[Example]] = defaultdict(list)
    while chunk := list(islice(source, _AT_ONCE)):
        for example in rendering.examples(chunk):
            width = _rounded(len(example.ids), _WIDTH_STEP)
            if width > LONGEST_TOKENS:
                continue
            shelves[width].append(example)
            if len(shelves[width]) >= batch_tokens // width:
                yield _padded(shelves.pop(width), width)


def _rounded(size: int, step: int) -> int:
    return -(-size // step) * step


def _padded(group: list[Example], width: int) -> Batch:
    """Padding comes last and is no target, so causal attention needs no mask."""
    ids = torch.zeros(len(group), width, dtype=torch.long)
    learned = torch.zeros(len(group), width, dtype=torch.bool)
    for row, example in enumerate(group):
        ids[row, : len(example.ids)] = torch.tensor(example.ids)
        learned[row, : len(example.ids)] = torch.tensor(example.learned)
    following = learned[:, 1:].reshape(-1).nonzero()[:, 0]
    rows = following // (width - 1)
    places = following + rows
    targets = ids.reshape(-1)[places + 1]
    spare = _rounded(len(places), _TARGETS_STEP) - len(places)
    return Batch(
        ids,
        torch.nn.functional.pad(places, (0, spare)),
        torch.nn.functional.pad(targets, (0, spare), value=IGNORED),
    )
