"""A file of KV blocks that outlives the process: a header, a record for each slot, then the data.

A slot is valid only as long as its record says so, which is written after the data; a checksum over
both finds what a crash or the disk left half-written. Read and written by calls instead of through
a mapping: a mapped page that the disk refuses is a signal that kills the host's process, a failed
call is an error that costs one block.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import stat
import struct
from dataclasses import asdict, dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING

from qwen3_asgi.errors import ModelLoadError
from qwen3_asgi.scheduler.blocks import CachedBlock
from qwen3_asgi.scheduler.prefix import block_digest

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

logger = logging.getLogger(__name__)

MAGIC = b"qwen3-kv"
# Raise it whenever the format changes, or the KV that the model computes for the same tokens.
VERSION = 1
HEADER_BYTES = 4096
PAGE = 4096
CHECKSUM_BYTES = 16
_PREFIX = struct.Struct("<8sII")
# Valid, sequence number, digest, parent, checksum; the token ids follow.
_RECORD = struct.Struct(f"<BxxxxxxxQ16s16s{CHECKSUM_BYTES}s")
# What a file system says that can't reserve space.
_CANNOT_RESERVE = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)


class DamagedBlock(Exception):
    """The slot does not hold what was once written to it."""


@dataclass(frozen=True, slots=True)
class FileLayout:
    """What must be equal for a file to be of use. `slots` and `data_bytes` fix every offset."""

    layers: int
    kv_heads: int
    head_dim: int
    block_size: int
    dtype: str
    data_bytes: int
    slots: int
    fingerprint: str

    @property
    def record_bytes(self) -> int:
        return _RECORD.size + 4 * self.block_size

    @property
    def data_offset(self) -> int:
        end = HEADER_BYTES + self.slots * self.record_bytes
        return -(-end // PAGE) * PAGE

    @property
    def file_bytes(self) -> int:
        return self.data_offset + self.slots * self.data_bytes

    def header(self) -> bytes:
        text = json.dumps(asdict(self), sort_keys=True).encode()
        return (_PREFIX.pack(MAGIC, VERSION, len(text)) + text).ljust(HEADER_BYTES, b"\0")


def slots_for(size_bytes: int, data_bytes: int, block_size: int) -> int:
    """How many slots a file of at most `size_bytes` has."""
    room = size_bytes - HEADER_BYTES - PAGE
    return max(0, room // (data_bytes + _RECORD.size + 4 * block_size))


class KVFile:
    """An open file, locked for this engine alone. After the start it belongs to the copy thread.

    Raises:
        ModelLoadError: it can't be opened, reserved or locked, or is somebody else's file.
    """

    def __init__(self, path: str, layout: FileLayout) -> None:
        self.layout = layout
        self._path = path
        self._tokens = struct.Struct(f"<{layout.block_size}I")
        self._sequence = 0
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except (OSError, ValueError) as error:
            raise ModelLoadError(f"kv_file {path!r}: {error}") from error
        try:
            self._lock()
            self._restored = self._open()
        except OSError as error:
            os.close(self._fd)
            raise ModelLoadError(
                f"kv_file {path} of {layout.file_bytes} bytes: {error.strerror}"
            ) from error
        except BaseException:
            os.close(self._fd)
            raise

    @property
    def num_slots(self) -> int:
        return self.layout.slots

    def restored(self) -> Mapping[int, CachedBlock]:
        """What was valid when the file was opened, the least recently written first."""
        return self._restored

    def write(self, slot: int, content: CachedBlock, data: memoryview) -> None:
        """
        Raises:
            OSError: it is not written; the slot holds nothing.
        """
        self._put(b"\0", self._record_at(slot))
        self._put(data, self._data_at(slot))
        self._sequence += 1
        record = _RECORD.pack(
            1, self._sequence, content.digest, content.parent, self._checksum(content, data)
        )
        self._put(record + self._tokens.pack(*content.token_ids), self._record_at(slot))

    def read(self, slot: int, content: CachedBlock, into: memoryview) -> None:
        """
        Raises:
            DamagedBlock: it is not what it should be; the slot holds nothing any more.
            OSError: it can't be read.
        """
        record = bytearray(_RECORD.size)
        self._get(memoryview(record), self._record_at(slot))
        valid, _, _, _, checksum = _RECORD.unpack(record)
        self._get(into, self._data_at(slot))
        if not valid or checksum != self._checksum(content, into):
            self.forget([slot])
            raise DamagedBlock(f"slot {slot} of {self._path} is damaged")

    def forget(self, slots: Sequence[int]) -> None:
        """These hold nothing any more; should this fail, the checksum still tells."""
        with contextlib.suppress(OSError):
            for slot in slots:
                self._put(b"\0", self._record_at(slot))

    def close(self) -> None:
        """Give up the file and its lock."""
        os.close(self._fd)

    def _lock(self) -> None:
        import fcntl

        if not stat.S_ISREG(os.fstat(self._fd).st_mode):
            raise ModelLoadError(f"kv_file {self._path} is not a regular file")
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ModelLoadError(
                f"kv_file {self._path} is in use by another engine; give each process its own"
            ) from None

    def _open(self) -> dict[int, CachedBlock]:
        size = os.fstat(self._fd).st_size
        if size:
            found = os.pread(self._fd, HEADER_BYTES, 0)
            # Zeros: a crash while the file was made.
            if found[: len(MAGIC)] not in (MAGIC, bytes(len(MAGIC))[: len(found)]):
                raise ModelLoadError(
                    f"kv_file {self._path} exists and is something else; it is left alone"
                )
            reason = self._unusable(found, size)
            if reason is None:
                return self._read_records()
            logger.warning("kv_file %s is started empty: %s", self._path, reason)
        self._make()
        return {}

    def _unusable(self, found: bytes, size: int) -> str | None:
        if found == self.layout.header():
            expected = self.layout.file_bytes
            return None if size == expected else f"it has {size} bytes of {expected}"
        try:
            _, version, length = _PREFIX.unpack_from(found)
            if version != VERSION:
                return f"it is of version {version}, this is {VERSION}"
            held = json.loads(found[_PREFIX.size : _PREFIX.size + length])
            wanted = asdict(self.layout)
            names = [name for name in wanted if held.get(name) != wanted[name]]
        except (struct.error, ValueError, AttributeError):
            return "its header is damaged"
        return f"its {', '.join(names)} differ" if names else "its header is damaged"

    def _make(self) -> None:
        """An empty file with all its space reserved: a full disk shows now, not in the traffic."""
        os.ftruncate(self._fd, 0)
        self._put(MAGIC, 0)
        try:
            self._reserve()
            self._put(self.layout.header(), 0)
        except OSError:
            os.ftruncate(self._fd, 0)
            raise

    def _reserve(self) -> None:
        if hasattr(os, "posix_fallocate"):
            try:
                os.posix_fallocate(self._fd, 0, self.layout.file_bytes)
                return
            except OSError as error:
                if error.errno not in _CANNOT_RESERVE:
                    raise
        os.ftruncate(self._fd, self.layout.file_bytes)

    def _read_records(self) -> dict[int, CachedBlock]:
        layout = self.layout
        records = bytearray(layout.slots * layout.record_bytes)
        self._get(memoryview(records), HEADER_BYTES)
        found: dict[bytes, tuple[int, int, CachedBlock]] = {}
        for slot in range(layout.slots):
            at = slot * layout.record_bytes
            valid, sequence, digest, parent, _ = _RECORD.unpack_from(records, at)
            if valid != 1:
                continue
            tokens = self._tokens.unpack_from(records, at + _RECORD.size)
            twin = found.get(digest)
            if block_digest(parent, tokens) != digest or (twin and twin[0] > sequence):
                continue
            found[digest] = sequence, slot, CachedBlock(digest, parent, tokens)
        in_order = sorted(found.values(), key=lambda entry: entry[0])
        if in_order:
            self._sequence = in_order[-1][0]
        return {slot: content for _, slot, content in in_order}

    def _checksum(self, content: CachedBlock, data: memoryview) -> bytes:
        checksum = blake2b(content.digest + content.parent, digest_size=CHECKSUM_BYTES)
        checksum.update(self._tokens.pack(*content.token_ids))
        checksum.update(data)
        return checksum.digest()

    def _record_at(self, slot: int) -> int:
        return HEADER_BYTES + slot * self.layout.record_bytes

    def _data_at(self, slot: int) -> int:
        return self.layout.data_offset + slot * self.layout.data_bytes

    def _put(self, data: bytes | memoryview, offset: int) -> None:
        rest = memoryview(data)
        while rest:
            count = os.pwrite(self._fd, rest, offset)
            rest, offset = rest[count:], offset + count

    def _get(self, into: memoryview, offset: int) -> None:
        while into:
            count = os.preadv(self._fd, [into], offset)
            if not count:
                raise DamagedBlock(f"{self._path} ends at {offset}, before its last slot")
            into, offset = into[count:], offset + count
