"""Moves KV blocks between the device's pool and host memory, many at a time.

Outside of the pool a block is one contiguous record `[2 * layers, kv_heads, block_size * head_dim]`
(keys and values of the first layer, of the second, …): one transfer over the bus and one write to a
file. Called by `tiers.TorchTiers`, in `torch.inference_mode`.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from qwen3_asgi.model.kv import KVPool


class Transfer(Protocol):
    """The device's side of all copies. `memory` is a tensor of records, `rows` index it."""

    # Whether `begin_read` alone makes it safe for later steps to write to the blocks.
    orders_itself: bool

    def allocate(self, count: int) -> torch.Tensor:
        """Host memory for `count` records."""
        ...

    def begin_read(
        self, blocks: Sequence[int], memory: torch.Tensor, rows: Sequence[int]
    ) -> Callable[[], None]:
        """Start to copy blocks into rows, without waiting; what it returns ends that, or raises.

        Called on the scheduler thread, and the result on the copy thread.
        """
        ...

    def write(
        self, blocks: Sequence[int], memory: torch.Tensor, rows: Sequence[int], after: object
    ) -> None:
        """Copy rows into blocks and wait for it, on the copy thread.

        `after` is what `written` returned when the copy was begun.
        """
        ...

    def before_step(self) -> None:
        """Let what this thread does next on the device wait for the reads begun before."""
        ...

    def after_step(self) -> None:
        """This thread has written to the pool: reads begun later wait for that."""
        ...

    def written(self) -> object:
        """What has been written to the pool so far."""
        ...

    def release(self, memory: torch.Tensor) -> None:
        """`memory` will not be used any more."""
        ...


class Blocks:
    """The pool's tensors, seen by block: `[kv_heads, num_blocks, block_size * head_dim]` each."""

    def __init__(self, pool: KVPool) -> None:
        first = pool.layers[0].keys
        heads, _, dim = first.shape
        width = pool.block_size * dim
        self.views = [
            cache.view(heads, pool.num_blocks, width) for layer in pool.layers for cache in layer
        ]
        self.dtype = first.dtype
        self.device = first.device
        self.record_shape = (len(self.views), heads, width)


class CpuTransfer:
    """The pool is host memory itself: the copy thread does it all, by two operators a tensor."""

    orders_itself = False

    def __init__(self, pool: KVPool) -> None:
        self._blocks = Blocks(pool)

    def allocate(self, count: int) -> torch.Tensor:
        return torch.empty((count, *self._blocks.record_shape), dtype=self._blocks.dtype)

    def begin_read(
        self, blocks: Sequence[int], memory: torch.Tensor, rows: Sequence[int]
    ) -> Callable[[], None]:
        return partial(self._read, list(blocks), memory, list(rows))

    def write(
        self, blocks: Sequence[int], memory: torch.Tensor, rows: Sequence[int], after: object
    ) -> None:
        into, out_of = torch.tensor(blocks), torch.tensor(rows)
        for number, view in enumerate(self._blocks.views):
            records = memory[:, number].index_select(0, out_of)
            view.index_copy_(1, into, records.transpose(0, 1))

    def before_step(self) -> None: ...

    def after_step(self) -> None: ...

    def written(self) -> object:
        return None

    def release(self, memory: torch.Tensor) -> None: ...

    def _read(self, blocks: list[int], memory: torch.Tensor, rows: list[int]) -> None:
        out_of, into = torch.tensor(blocks), torch.tensor(rows)
        for number, view in enumerate(self._blocks.views):
            records = view.index_select(1, out_of).transpose(0, 1)
            memory[:, number].index_copy_(0, into, records)


class CudaTransfer:
    """Pinned host memory and a stream of its own, ordered against the steps' by events.

    Blocks are gathered on the device first, so a step that wants to write to them waits for that
    only, not for the bus.
    """

    orders_itself = True

    def __init__(self, pool: KVPool) -> None:
        self._blocks = Blocks(pool)
        self._stream = torch.cuda.Stream(self._blocks.device)  # type: ignore[no-untyped-call]
        # Replaced by the scheduler thread, read by those that run steps.
        self._gathered: torch.cuda.Event | None = None
        # The end of the last step of each stream; a stream belongs to one thread.
        self._written: dict[int, torch.cuda.Event] = {}

    def allocate(self, count: int) -> torch.Tensor:
        memory = torch.empty((count, *self._blocks.record_shape), dtype=self._blocks.dtype)
        if memory.nbytes:
            # Torch's own pinned memory comes in powers of two: 40 GiB would take 64.
            _check(_runtime().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
        return memory

    def begin_read(
        self, blocks: Sequence[int], memory: torch.Tensor, rows: Sequence[int]
    ) -> Callable[[], None]:
        with torch.cuda.stream(self._stream):
            for event in list(self._written.values()):
                self._stream.wait_event(event)
            index = self._on_device(blocks)
            gathered = self._staging(len(blocks))
            for number, view in enumerate(self._blocks.views):
                gathered[:, number].copy_(view.index_select(1, index).transpose(0, 1))
            self._gathered = self._stream.record_event()
            for record, row in zip(gathered, rows, strict=True):
                memory[row].copy_(record, non_blocking=True)
            done: torch.cuda.Event = self._stream.record_event()
        return partial(_wait, done)

    def write(
        self, blocks: Sequence[int], memory: torch.Tensor, rows: Sequence[int], after: object
    ) -> None:
        with torch.cuda.stream(self._stream):
            if isinstance(after, list):
                for event in after:
                    self._stream.wait_event(event)
            index = self._on_device(blocks)
            arrived = self._staging(len(blocks))
            for record, row in zip(arrived, rows, strict=True):
                record.copy_(memory[row], non_blocking=True)
            for number, view in enumerate(self._blocks.views):
                view.index_copy_(1, index, arrived[:, number].transpose(0, 1))
            done = self._stream.record_event()
        # Not the stream: reads that are begun meanwhile would prolong this.
        done.synchronize()

    def before_step(self) -> None:
        gathered = self._gathered
        if gathered is not None:
            torch.cuda.current_stream(self._blocks.device).wait_event(gathered)

    def after_step(self) -> None:
        stream = torch.cuda.current_stream(self._blocks.device)
        self._written[stream.cuda_stream] = stream.record_event()

    def written(self) -> object:
        return list(self._written.values())

    def release(self, memory: torch.Tensor) -> None:
        if memory.nbytes:
            _check(_runtime().cudaHostUnregister(memory.data_ptr()))

    def _on_device(self, blocks: Sequence[int]) -> torch.Tensor:
        # From pageable memory this would wait for everything that is queued on the stream.
        pinned = torch.tensor(blocks).pin_memory()
        return pinned.to(self._blocks.device, non_blocking=True)

    def _staging(self, count: int) -> torch.Tensor:
        shape = (count, *self._blocks.record_shape)
        return torch.empty(shape, dtype=self._blocks.dtype, device=self._blocks.device)


def _wait(event: torch.cuda.Event) -> None:
    event.synchronize()


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _check(result: Any) -> None:
    torch.cuda.check_error(result)


def transfer_for(pool: KVPool) -> Transfer:
    cuda = pool.layers[0].keys.device.type == "cuda"
    return CudaTransfer(pool) if cuda else CpuTransfer(pool)
