"""The rows of a decode step in, tensors that stay where they are out, as CUDA graphs need them."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import torch

from qwen3_asgi.model.batch import Batch, Paged
from qwen3_asgi.model.cuda.sampling import NO_TOKEN_BEFORE
from qwen3_asgi.scheduler.plan import PENDING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from qwen3_asgi.scheduler.plan import RequestId, Row

# In place of an index into the last step's samples.
KNOWN = -1
MISSING = -2
# Columns of a row: token, position, slot, index into the last samples, and the span's four.
COLUMNS = 8


class DecodeInputs:
    """Buffers for up to `max_batch` rows of one token. Used by one thread.

    Rows beyond those of a step fill its bucket up: they hold nothing and write nothing.

    Args:
        max_tokens: of a sequence.
        vocab_size: token ids are below it.
        num_blocks: block ids are below it.
    """

    def __init__(
        self,
        *,
        max_batch: int,
        max_tokens: int,
        block_size: int,
        num_blocks: int,
        vocab_size: int,
        device: torch.device,
    ) -> None:
        self._max_tokens = max_tokens
        self._block_size = block_size
        self._num_blocks = num_blocks
        self._vocab_size = vocab_size
        self._width = -(-max_tokens // block_size)
        self._columns = torch.zeros(COLUMNS * max_batch, dtype=torch.int64, device=device)
        self._tables = torch.zeros(max_batch, self._width, dtype=torch.int32, device=device)
        # Two, for the copy out of one may still run while the next step fills the other.
        self._stages = tuple(_Stage(self._columns, self._tables) for _ in range(2))
        self._lost = torch.zeros(max_batch, dtype=torch.bool, device=device)

    def fill(
        self,
        rows: Sequence[Row],
        bucket: int,
        known: Mapping[RequestId, int],
        samples: Tensor | None,
    ) -> None:
        """Upload the rows; nothing is read back.

        Args:
            known: index into `samples` by request, for rows whose token is `PENDING`.
            samples: int64 tokens of the step before, or a negative code; on the device.

        Raises:
            ValueError: a token or block id out of range, a table too short or a sequence too long.
        """
        self._stages = self._stages[::-1]
        stage = self._stages[0]
        stage.wait()
        columns: list[list[int]] = []
        for i, row in enumerate(rows):
            columns.append(self._row(i, row, known))
            stage.write_table(i, row.block_table[: row.start // self._block_size + 1])
        columns += ([0, 0, -1, KNOWN, i, 1, -1, 0] for i in range(len(rows), bucket))
        # Column by column, so that each is contiguous; a span's four stay together.
        flat = array("q")
        for column in zip(*(row[:4] for row in columns), strict=True):
            flat.extend(column)
        for entry in columns:
            flat.extend(entry[4:])
        stage.upload(flat, bucket)
        self._settle(bucket, samples)

    def batch(self, bucket: int, last_position: int) -> Batch:
        """The first `bucket` rows, as views that a later `fill` of that bucket changes."""
        token_ids, positions, slots, _ = self._columns[: 4 * bucket].view(4, bucket)
        spans = self._columns[4 * bucket : COLUMNS * bucket].view(bucket, 4)
        return Batch(
            token_ids=token_ids,
            positions=positions,
            slots=slots,
            segments=(),
            paged=Paged(spans, self._tables.view(-1), self._block_size),
            last_position=last_position,
            last_rows=tuple(range(bucket)),
        )

    def mark_lost(self, tokens: Tensor) -> Tensor:
        """This step's `tokens`, with a code where there was no token to go on from."""
        return tokens.masked_fill(self._lost[: len(tokens)], NO_TOKEN_BEFORE)

    def _row(self, index: int, row: Row, known: Mapping[RequestId, int]) -> list[int]:
        token, start = row.token_ids[0], row.start
        needed = start // self._block_size + 1
        if not 0 <= start < self._max_tokens:
            raise ValueError(
                f"row {row.request_id} ends at token {start + 1}, "
                f"the model holds at most {self._max_tokens}"
            )
        if len(row.block_table) < needed:
            raise ValueError(
                f"row {row.request_id} ends at token {start + 1}, its block table covers "
                f"{len(row.block_table) * self._block_size}"
            )
        table = row.block_table[:needed]
        # Unchecked, an id out of range would read or overwrite another sequence's memory.
        for what, low, high, limit in (
            ("block", min(table), max(table), self._num_blocks),
            ("token", 0 if token == PENDING else token, token, self._vocab_size),
        ):
            if low < 0 or high >= limit:
                raise ValueError(
                    f"row {row.request_id}: {what} id {low if low < 0 else high} is out of range, "
                    f"valid are 0 to {limit - 1}"
                )
        take = known.get(row.request_id, MISSING) if token == PENDING else KNOWN
        slot = table[-1] * self._block_size + start % self._block_size
        return [max(token, 0), start, slot, take, index, 1, start, index * self._width]

    def _settle(self, bucket: int, samples: Tensor | None) -> None:
        """Put the last step's samples in place of pending tokens."""
        token_ids, _, slots, take = self._columns[: 4 * bucket].view(4, bucket)
        lost = take == MISSING
        if samples is not None:
            found = samples[take.clamp(min=0)]
            pending = take >= 0
            lost |= pending & (found < 0)
            token_ids.copy_(torch.where(pending, found.clamp(min=0), token_ids))
        # Such a row ends with an error; until then it must not write what is no token's.
        slots.masked_fill_(lost, -1)
        self._lost[:bucket] = lost


class _Stage:
    """Host memory of one upload: pinned, if it goes to a CUDA device."""

    def __init__(self, columns: Tensor, tables: Tensor) -> None:
        pinned = columns.is_cuda
        self._targets = (columns, tables)
        self._columns = torch.zeros(columns.shape, dtype=columns.dtype, pin_memory=pinned)
        self._tables = torch.zeros(tables.shape, dtype=tables.dtype, pin_memory=pinned)
        self._written: list[list[int]] = [[] for _ in range(len(tables))]
        self._copied = torch.cuda.Event() if pinned else None  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Until the last upload has been read."""
        if self._copied is not None:
            self._copied.synchronize()

    def write_table(self, index: int, table: list[int]) -> None:
        """A table seldom changes but at its end, and comparing costs less than writing."""
        written = self._written[index]
        begin = len(written) if table[: len(written)] == written else 0
        if begin < len(table):
            self._tables[index, begin : len(table)] = torch.tensor(table[begin:], dtype=torch.int32)
        self._written[index] = table

    def upload(self, flat: array[int], bucket: int) -> None:
        columns, tables = self._targets
        self._columns[: len(flat)] = torch.frombuffer(flat, dtype=torch.int64)
        columns[: len(flat)].copy_(self._columns[: len(flat)], non_blocking=True)
        tables[:bucket].copy_(self._tables[:bucket], non_blocking=True)
        if self._copied is not None:
            self._copied.record()
