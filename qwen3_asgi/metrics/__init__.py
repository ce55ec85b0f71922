"""What the engine tells the world: one catalogue of families, and their way into a registry.

The scheduler measures into an `EngineMetrics`; registries that it is attached to show it.
"""

from __future__ import annotations

from qwen3_asgi.metrics.catalogue import CATALOGUE, catalogue_markdown
from qwen3_asgi.metrics.exposition import render
from qwen3_asgi.metrics.families import MetricLabelsTaken, MetricNameTaken
from qwen3_asgi.metrics.recorder import EngineMetrics

__all__ = [
    "CATALOGUE",
    "EngineMetrics",
    "MetricLabelsTaken",
    "MetricNameTaken",
    "catalogue_markdown",
    "render",
]
