"""Tells checkpoints apart by what is in them, without reading all of it."""

from __future__ import annotations

import json
from hashlib import blake2b
from typing import TYPE_CHECKING

from qwen3_asgi.errors import ModelLoadError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from typing import BinaryIO

# Of every tensor: a fine-tune may have changed a single one.
SAMPLES = 4
SAMPLE_BYTES = 1024


def fingerprint(folder: Path, weight_files: list[str], order: str | None = None) -> str:
    """A digest of `config.json`, of the weights' files' names, sizes and headers, and of samples.

    `order` tells apart those that compute with the same weights in ways that matter.

    Raises:
        ModelLoadError: a file can't be read.
    """
    digest = blake2b((order or "").encode(), digest_size=16, person=b"qwen3-weights")
    try:
        digest.update((folder / "config.json").read_bytes())
        for name in weight_files:
            with (folder / name).open("rb") as file:
                for part in _parts(name, file):
                    digest.update(len(part).to_bytes(8, "little") + part)
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{folder}: {error}") from error
    return digest.hexdigest()


def _parts(name: str, file: BinaryIO) -> Iterator[bytes]:
    yield name.encode()
    yield str(file.seek(0, 2)).encode()
    file.seek(0)
    # A safetensors file: the header's length, the header (JSON), the tensors.
    header = file.read(int.from_bytes(file.read(8), "little"))
    data = file.tell()
    yield header
    for tensor, entry in sorted(json.loads(header).items()):
        if tensor == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        for sample in range(SAMPLES):
            first = begin + (end - begin) * sample // SAMPLES
            file.seek(data + first)
            yield file.read(min(SAMPLE_BYTES, end - first))
