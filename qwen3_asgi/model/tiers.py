"""`TorchTiers`: KV blocks in host memory and in a file, copied by a thread beside the steps.

The scheduler says what goes where (`scheduler.tiers`), and never begins a copy that reads or
writes what another one still writes, but for one case: what a store reads, a later load may
overwrite. So stores come first, since steps wait for them, then loads, since requests wait for
those, then what moves from host memory to the file; each in the order in which it was begun.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING

import torch

from qwen3_asgi.errors import ModelLoadError
from qwen3_asgi.model.fingerprint import fingerprint
from qwen3_asgi.model.kv import bytes_per_block
from qwen3_asgi.model.kv_file import DamagedBlock, FileLayout, KVFile, slots_for
from qwen3_asgi.model.kv_transfer import transfer_for
from qwen3_asgi.model.memory import GIB, host_slots
from qwen3_asgi.scheduler.executor import LandedCopies

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from qwen3_asgi.config import EngineConfig
    from qwen3_asgi.model.config import ModelConfig
    from qwen3_asgi.model.kv import KVPool
    from qwen3_asgi.scheduler.blocks import CachedBlock
    from qwen3_asgi.scheduler.executor import Copy, KVTiers

logger = logging.getLogger(__name__)

# Copied in one go: long enough that operators cost little, short enough that a store, for which a
# step may wait, is never far behind a load.
PIECE_BYTES = 8 * 2**20
PIECE_BLOCKS = 64


@dataclass(slots=True)
class _Batch:
    """The copies of one `begin`."""

    ticket: int
    pieces_left: int = 0
    failed: dict[int, str] = field(default_factory=dict)


@dataclass(slots=True)
class _Piece:
    """Copies of one batch between the same two levels; `first` is the index of its first one."""

    batch: _Batch
    first: int
    copies: Sequence[Copy]
    # For a store of which the device has already begun its part: ends it.
    finish: Callable[[], None] | None = None
    after: object = None

    @property
    def sources(self) -> list[int]:
        return [copy.source.slot for copy in self.copies]

    @property
    def targets(self) -> list[int]:
        return [copy.target.slot for copy in self.copies]


class TorchTiers:
    """Implements `KVTiers`. `begin`, `landed` and `forget` are the scheduler thread's.

    `before_step` and `after_step` are called on whatever thread runs a step.
    """

    def __init__(self, pool: KVPool, num_host_slots: int, file: KVFile | None) -> None:
        self.host_slots = num_host_slots
        self.file_slots = 0 if file is None else file.num_slots
        # Called on the copy thread when something has landed.
        self.wake: Callable[[], None] = _nobody
        self._file = file
        self._transfer = transfer_for(pool)
        self._host = self._transfer.allocate(num_host_slots)
        record_bytes = pool.bytes_per_block
        self._piece_blocks = min(PIECE_BLOCKS, max(1, PIECE_BYTES // record_bytes))
        # What comes from the file, or goes there past host memory, passes through here.
        self._passage = self._transfer.allocate(self._piece_blocks if file else 0)
        self._host_bytes = _as_bytes(self._host)
        self._passage_bytes = _as_bytes(self._passage)
        self._tickets = 0
        self._landed: deque[LandedCopies] = deque()
        # Shared with the copy thread, under `_changed`.
        self._changed = threading.Condition()
        self._stores: deque[_Piece] = deque()
        self._loads: deque[_Piece] = deque()
        self._moves: deque[_Piece] = deque()
        self._forgotten: list[int] = []
        self._stores_begun = 0
        self._stores_read = 0
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="qwen3-asgi kv copies", daemon=True)
        self._thread.start()

    def restored(self) -> Mapping[int, CachedBlock]:
        return {} if self._file is None else self._file.restored()

    @torch.inference_mode()
    def begin(self, copies: Sequence[Copy]) -> int:
        self._tickets += 1
        batch = _Batch(self._tickets)
        pieces = self._cut(batch, copies)
        batch.pieces_left = len(pieces)
        for piece in pieces:
            self._begin_on_device(piece)
        with self._changed:
            if self._closing:
                raise RuntimeError("the tiers are closed")
            for piece in pieces:
                match piece.copies[0].source.level, piece.copies[0].target.level:
                    case "device", _:
                        self._stores.append(piece)
                        self._stores_begun += 1
                    case _, "device":
                        self._loads.append(piece)
                    case _:
                        self._moves.append(piece)
            self._changed.notify_all()
        return batch.ticket

    def landed(self) -> Sequence[LandedCopies]:
        return [self._landed.popleft() for _ in range(len(self._landed))]

    def forget(self, slots: Sequence[int]) -> None:
        with self._changed:
            self._forgotten += slots
            self._changed.notify_all()

    def before_step(self) -> None:
        """Wait until the blocks whose stores were begun may be written to."""
        self._transfer.before_step()
        if self._transfer.orders_itself or self._stores_read >= self._stores_begun:
            return
        with self._changed:
            begun = self._stores_begun
            self._changed.wait_for(lambda: self._stores_read >= begun)

    def after_step(self) -> None:
        """Blocks have been written to."""
        self._transfer.after_step()

    def close(self) -> None:
        """Finish what was begun, then give up the memory and the file. Idempotent."""
        with self._changed:
            if self._closing:
                return
            self._closing = True
            self._changed.notify_all()
        self._thread.join()
        for memory in (self._host, self._passage):
            self._transfer.release(memory)
        self._host_bytes = self._passage_bytes = []
        self._host = self._passage = torch.empty(0)
        if self._file is not None:
            self._file.close()

    def _cut(self, batch: _Batch, copies: Sequence[Copy]) -> list[_Piece]:
        pieces: list[_Piece] = []
        first = 0
        for _, alike in groupby(copies, lambda copy: (copy.source.level, copy.target.level)):
            rest = list(alike)
            while rest:
                now, rest = rest[: self._piece_blocks], rest[self._piece_blocks :]
                pieces.append(_Piece(batch, first, now))
                first += len(now)
        return pieces

    def _begin_on_device(self, piece: _Piece) -> None:
        levels = piece.copies[0].source.level, piece.copies[0].target.level
        if levels == ("device", "host"):
            try:
                piece.finish = self._transfer.begin_read(piece.sources, self._host, piece.targets)
            except Exception as error:
                piece.finish = _failing(error)
        elif levels[1] == "device":
            piece.after = self._transfer.written()

    # ---- the copy thread ----

    @torch.inference_mode()
    def _run(self) -> None:
        while True:
            piece, forgotten = self._next()
            if forgotten and self._file is not None:
                self._file.forget(forgotten)
            if piece is None:
                if forgotten:
                    continue
                return
            try:
                failed = self._copy(piece)
            except Exception as error:
                logger.exception("copying %d KV blocks failed", len(piece.copies))
                failed = dict.fromkeys(range(len(piece.copies)), repr(error))
            self._end(piece, failed)

    def _next(self) -> tuple[_Piece | None, list[int]]:
        """What to do next, and the slots to forget before it; None and none at the end."""
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    self._stores or self._loads or self._moves or self._forgotten or self._closing
                )
            )
            forgotten, self._forgotten = self._forgotten, []
            for waiting in (self._stores, self._loads, self._moves):
                if waiting:
                    return waiting.popleft(), forgotten
            return None, forgotten

    def _copy(self, piece: _Piece) -> Mapping[int, str]:
        """Returns what failed, by its index in the piece."""
        sources, targets = piece.sources, piece.targets
        match piece.copies[0].source.level, piece.copies[0].target.level:
            case "device", "host" if piece.finish is not None:
                piece.finish()
                return {}
            case "device", "file":
                rows = range(len(sources))
                self._transfer.begin_read(sources, self._passage, rows)()
                return self._to_file(piece, [self._passage_bytes[row] for row in rows])
            case "host", "file":
                return self._to_file(piece, [self._host_bytes[slot] for slot in sources])
            case "host", "device":
                self._transfer.write(targets, self._host, sources, piece.after)
                return {}
            case "file", "device":
                return self._from_file(piece)
            case levels:
                raise ValueError(f"no copies from {levels[0]} to {levels[1]}")

    def _to_file(self, piece: _Piece, records: Sequence[memoryview]) -> Mapping[int, str]:
        failed: dict[int, str] = {}
        for index, (copy, record) in enumerate(zip(piece.copies, records, strict=True)):
            try:
                self._open_file().write(copy.target.slot, copy.content, record)
            except OSError as error:
                failed[index] = str(error)
        _log_failed(failed)
        return failed

    def _from_file(self, piece: _Piece) -> Mapping[int, str]:
        failed: dict[int, str] = {}
        for index, copy in enumerate(piece.copies):
            try:
                self._open_file().read(copy.source.slot, copy.content, self._passage_bytes[index])
            except (DamagedBlock, OSError) as error:
                failed[index] = str(error)
        good = [index for index in range(len(piece.copies)) if index not in failed]
        if good:
            blocks = [piece.copies[index].target.slot for index in good]
            self._transfer.write(blocks, self._passage, good, piece.after)
        _log_failed(failed)
        return failed

    def _open_file(self) -> KVFile:
        if self._file is None:
            raise ValueError("there is no file")
        return self._file

    def _end(self, piece: _Piece, failed: Mapping[int, str]) -> None:
        batch = piece.batch
        for index, reason in failed.items():
            batch.failed[piece.first + index] = reason
        batch.pieces_left -= 1
        if piece.copies[0].source.level == "device":
            with self._changed:
                self._stores_read += 1
                self._changed.notify_all()
        if not batch.pieces_left:
            self._landed.append(LandedCopies(batch.ticket, batch.failed))
            try:
                self.wake()
            except Exception:
                logger.exception("nobody could be told that copies have landed")


if TYPE_CHECKING:
    _conforms: type[KVTiers] = TorchTiers


def open_tiers(
    folder: Path,
    weight_files: list[str],
    model: ModelConfig,
    settings: EngineConfig,
    pool: KVPool,
    order: str | None = None,
) -> TorchTiers | None:
    """What the settings ask for; None if that is nothing.

    Args:
        folder: of the checkpoint.
        weight_files: its files of weights.
        model: its shape.
        settings: of the engine.
        pool: what is copied from and to.
        order: of summation, where the bits of a kept block matter (`invariant.order_of`).

    Raises:
        ModelLoadError: there is not so much memory, or the file can't be used.
    """
    if not settings.host_kv_gib and settings.kv_file is None:
        return None
    keys = pool.layers[0].keys
    if keys.device.type == "cuda" and not settings.host_kv_gib:
        raise ModelLoadError("kv_file on a CUDA device needs host memory in front: host_kv_gib")
    num_host_slots = host_slots(model, settings, pool.num_blocks, keys.dtype, keys.device.type)
    file = None
    if settings.kv_file is not None:
        data_bytes = bytes_per_block(model, settings.block_size, keys.dtype)
        slots = slots_for(int(settings.kv_file_gib * GIB), data_bytes, settings.block_size)
        if not slots:
            raise ModelLoadError(f"kv_file_gib={settings.kv_file_gib} holds not one KV block")
        layout = FileLayout(
            layers=model.num_layers,
            kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            block_size=settings.block_size,
            dtype=str(keys.dtype),
            data_bytes=data_bytes,
            slots=slots,
            fingerprint=fingerprint(folder, weight_files, order),
        )
        file = KVFile(settings.kv_file, layout)
    try:
        return TorchTiers(pool, num_host_slots, file)
    except RuntimeError as error:  # the host's memory can't be had, or not be pinned
        if file is not None:
            file.close()
        raise ModelLoadError(f"host_kv_gib={settings.host_kv_gib}: {error}") from error


def _as_bytes(memory: torch.Tensor) -> list[memoryview]:
    """Each record as bytes, without copying."""
    if not memory.numel():
        return []
    return [memoryview(record) for record in memory.view(torch.uint8).flatten(1).numpy()]


def _failing(error: Exception) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail


def _log_failed(failed: Mapping[int, str]) -> None:
    if failed:
        logger.warning(
            "%d KV blocks could not be copied: %s", len(failed), *list(failed.values())[:1]
        )


def _nobody() -> None:
    pass
