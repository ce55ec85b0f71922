"""Samples in, figures out: quantiles of repeated measurements, and tables for a person."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


@dataclass(frozen=True, slots=True)
class Spread:
    """What repeated measurements of one thing gave. The minimum is the one least disturbed."""

    median: float
    p10: float
    p90: float
    min: float

    @classmethod
    def of(cls, samples: Iterable[float]) -> Spread:
        """
        Raises:
            ValueError: no samples.
        """
        ordered = sorted(samples)
        if not ordered:
            raise ValueError("nothing was measured")
        return cls(
            round(statistics.median(ordered), 3),
            round(quantile(ordered, 0.1), 3),
            round(quantile(ordered, 0.9), 3),
            round(ordered[0], 3),
        )


def quantile(ordered: Sequence[float], share: float) -> float:
    """The sample below which this share of the sorted samples lies; the nearest one."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Lines with aligned columns: the first to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if place == 0 else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def pairs(rows: Sequence[tuple[str, str]]) -> str:
    """Lines of name and value, both to the left."""
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)
