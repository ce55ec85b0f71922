"""Compares all bookkeeping of a scheduler with itself; for tests and for idle moments."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qwen3_asgi.scheduler.request import State

if TYPE_CHECKING:
    from qwen3_asgi.scheduler.blocks import BlockPool
    from qwen3_asgi.scheduler.loading import Loading
    from qwen3_asgi.scheduler.queues import QueueTable


def check_integrity(queues: QueueTable, pool: BlockPool, loading: Loading | None) -> None:
    """
    Raises:
        RuntimeError: a block, a slot or a request is lost or counted twice, or a block is shared
            while one of its owners writes to it.
    """
    tables = [request.blocks for request in queues]
    pool.check_integrity(tables + ([] if loading is None else loading.held_blocks))
    if sum(len(queues[state]) for state in State) != len(queues):
        raise RuntimeError("a live request is in no queue, or in two")
    if loading is not None:
        loading.index.check_integrity()
    for request in queues:
        full = request.num_computed // pool.block_size
        shared = [block for block in request.blocks[full:] if pool.references(block) > 1]
        if shared and request.state is not State.LOADING:
            raise RuntimeError(f"request {request.id} writes to shared KV blocks {shared[:8]}")
