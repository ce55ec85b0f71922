"""The load snapshot: one immutable value that gauges, `/load`, tests and routers all read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from qwen3_asgi.scheduler.request import State

if TYPE_CHECKING:
    from qwen3_asgi.scheduler.blocks import BlockPool
    from qwen3_asgi.scheduler.queues import QueueTable


@dataclass(frozen=True, slots=True)
class LoadSnapshot:
    """The scheduler's load as last published. Reading it takes no lock.

    `num_running` counts prefilling, in-flight and active requests, `num_waiting` the deferred,
    loading and held-back ones. `kv_used_blocks` are referenced by a live request;
    `kv_cached_blocks` hold a reusable prefix that no live request references.
    `num_loading` and `num_held` are those of the waiting that wait for a copy of their prefix, or
    behind a control command. `waiting_tokens` are the tokens that the waiting have to forward, as
    far as known. `num_adapters` LoRA adapters are loaded. `finish_rate` is in requests per second.
    `iteration` and `step` count scheduler iterations and forward passes since the start.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_loading: int = 0
    num_held: int = 0
    num_adapters: int = 0
    waiting_tokens: int = 0
    kv_used_blocks: int = 0
    kv_cached_blocks: int = 0
    kv_total_blocks: int = 0
    iteration: int = 0
    step: int = 0
    finish_rate: float = 0.0

    @property
    def kv_usage(self) -> float:
        """Used part of the KV pool, 0.0 to 1.0."""
        return self.kv_used_blocks / self.kv_total_blocks if self.kv_total_blocks else 0.0

    @property
    def idle(self) -> bool:
        return self.num_running == 0 and self.num_waiting == 0


def take_snapshot(
    queues: QueueTable,
    pool: BlockPool,
    *,
    num_adapters: int,
    iteration: int,
    step: int,
    finish_rate: float,
) -> LoadSnapshot:
    """The load as the queues and the pool are now."""
    return LoadSnapshot(
        num_running=queues.num_running,
        num_waiting=queues.num_waiting,
        num_loading=len(queues[State.LOADING]),
        num_held=len(queues[State.POST_CONTROL_DEFERRED]),
        num_adapters=num_adapters,
        waiting_tokens=queues.waiting_tokens,
        kv_used_blocks=pool.used,
        kv_cached_blocks=pool.cached,
        kv_total_blocks=pool.num_blocks,
        iteration=iteration,
        step=step,
        finish_rate=finish_rate,
    )
