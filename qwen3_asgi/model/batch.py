"""The rows of a plan in, one flattened batch of tensors out, checked against the pool."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from qwen3_asgi.model.kv import Stretch, stretches
from qwen3_asgi.model.upload import send, upload

if TYPE_CHECKING:
    from collections.abc import Sequence

    from qwen3_asgi.scheduler.plan import Row


class Segment(NamedTuple):
    """Rows `first … first+length-1` of the batch are one sequence's.

    `held` has the positions before them; for a segment of one row, that row's position too.
    """

    first: int
    length: int
    held: tuple[Stretch, ...]


class Paged(NamedTuple):
    """Where the sequences lie, for kernels that read block tables themselves.

    `spans` is int64 `[R, 4]`: first row of the batch, number of rows, position of the first, and
    where the sequence's block ids begin in `tables`, int32.
    """

    spans: torch.Tensor
    tables: torch.Tensor
    block_size: int


@dataclass(frozen=True, slots=True)
class Batch:
    """T tokens of all rows, one after another. Index tensors are int64 `[T]`.

    Either `paged` is set or `segments` has an entry per row.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    segments: tuple[Segment, ...]
    paged: Paged | None
    last_position: int
    last_rows: tuple[int, ...]


def build_batch(
    rows: Sequence[Row],
    *,
    vocab_size: int,
    block_size: int,
    num_blocks: int,
    max_tokens: int,
    device: torch.device,
    paged: bool = False,
) -> Batch:
    """Flatten rows. `last_rows` has the index of each row's last token.

    With `paged` the block tables are passed on as they are, else resolved into `segments`.

    Raises:
        ValueError: a row without tokens, a token id outside the vocabulary, a block id outside the
            pool, a table too short, or a sequence longer than `max_tokens`.
    """
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    segments: list[Segment] = []
    last_rows: list[int] = []
    spans: list[int] = []
    tables = array("i")
    for row in rows:
        length, start = len(row.token_ids), row.start
        end = start + length
        table = row.block_table[: -(-end // block_size)]
        _check_row(row, end, len(table) * block_size, max_tokens)
        _check_ids(row, "token", row.token_ids, vocab_size)
        _check_ids(row, "block", table, num_blocks)
        first = len(token_ids)
        if paged:
            spans += (first, length, start, len(tables))
            tables.extend(table)
        else:
            held = stretches(table, end if length == 1 else start, block_size, device)
            segments.append(Segment(first, length, held))
        token_ids.extend(row.token_ids)
        if length == 1:
            positions.append(start)
            slots.append(table[-1] * block_size + start % block_size)
        else:
            positions.extend(range(start, end))
            slots.extend(
                table[position // block_size] * block_size + position % block_size
                for position in range(start, end)
            )
        last_rows.append(len(token_ids) - 1)
    ids, places, into, sequences = _in_one((token_ids, positions, slots, spans), device)
    blocks = None
    if paged:
        found = send(torch.frombuffer(tables, dtype=torch.int32), device)
        blocks = Paged(sequences.view(-1, 4), found, block_size)
    return Batch(
        token_ids=ids,
        positions=places,
        slots=into,
        segments=tuple(segments),
        paged=blocks,
        last_position=max(positions),
        last_rows=tuple(last_rows),
    )


def _in_one(lists: Sequence[list[int]], device: torch.device) -> list[torch.Tensor]:
    """Each list as int64 on `device`, all parts of one tensor: making one costs as much, however
    short it is. Each part begins at a multiple of 16 bytes, which kernels are compiled for."""
    values: list[int] = []
    ranges = []
    for each in lists:
        values += [0] * (len(values) % 2)
        ranges.append((len(values), len(each)))
        values += each
    whole = upload(values, torch.int64, device)
    return [whole.narrow(0, first, count) for first, count in ranges]


def _check_row(row: Row, end: int, covered: int, max_tokens: int) -> None:
    if end == row.start or row.start < 0:
        raise ValueError(f"row {row.request_id} has no tokens or a negative start")
    if end > max_tokens:
        raise ValueError(
            f"row {row.request_id} ends at token {end}, the model holds at most {max_tokens}"
        )
    if covered < end:
        raise ValueError(
            f"row {row.request_id} ends at token {end}, its block table covers {covered}"
        )


def _check_ids(row: Row, what: str, ids: Sequence[int], limit: int) -> None:
    # Unchecked, an id out of range would read or overwrite another sequence's memory.
    low, high = min(ids), max(ids)
    if low < 0 or high >= limit:
        wrong = low if low < 0 else high
        raise ValueError(
            f"row {row.request_id}: {what} id {wrong} is out of range, valid are 0 to {limit - 1}"
        )
