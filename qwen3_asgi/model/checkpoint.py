"""A checkpoint folder in, tensors out. Reads safetensors only: no pickle, no code from the hub."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from qwen3_asgi.errors import ModelLoadError
from qwen3_asgi.model.config import read_json

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    import torch

HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "merges.txt", "vocab.txt")
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
STORED_FLOAT8 = "F8_E4M3"


def find_folder(model: str | Path) -> Path:
    """Return the folder of a local path or, failing that, of a hub id (downloaded once).

    Raises:
        ModelLoadError: neither a folder nor a hub id that can be fetched.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise ModelLoadError(f"{path} is a file; give the folder that holds config.json")
    name = str(model)
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise ModelLoadError(f"no such folder: {path}")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=list(HUB_FILES)))
    except Exception as error:
        raise ModelLoadError(f"{name} is no local folder, and the hub said: {error}") from error


class Checkpoint:
    """The tensors of one folder: `model.safetensors`, or the shards that an index names.

    Only headers are read until `read` is called.

    Raises:
        ModelLoadError: a file is missing, damaged, or not safetensors.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file_of: dict[str, str] = {}
        self._open: dict[str, Any] = {}
        for name in self._file_names():
            handle = self._open[name] = _open(folder / name)
            self._file_of.update(dict.fromkeys(handle.keys(), name))

    @property
    def file_names(self) -> list[str]:
        """The files that hold the tensors, in the checkpoint's folder."""
        return list(self._open)

    def check(self, shapes: Mapping[str, Sequence[int]], ignored: Collection[str] = ()) -> None:
        """Compare the headers with the tensors and shapes that the model needs.

        Raises:
            ModelLoadError: names the file, the tensor, and the expected and found shape.
        """
        for name, shape in shapes.items():
            if name not in self._file_of:
                raise ModelLoadError(
                    f"{self._folder}: tensor {name!r} of shape {list(shape)} is missing"
                )
            found = list(self._header(name).get_shape())
            if found != list(shape):
                raise ModelLoadError(
                    f"{self._where(name)}: expected shape {list(shape)}, found {found}"
                )
            self.dtype_name(name)
        for name in self._file_of:
            # Old checkpoints store the rotary frequencies; they follow from the config.
            if name not in shapes and name not in ignored and not name.endswith(".inv_freq"):
                raise ModelLoadError(
                    f"{self._where(name)}: unexpected, of shape "
                    f"{list(self._header(name).get_shape())}; the model has no place for it"
                )

    def read(self, name: str) -> torch.Tensor:
        """Read one tensor as it is stored.

        It may share memory with the file: the caller copies what it keeps, or a checkpoint that is
        replaced on disk while it is served would change the running model.
        """
        tensor: torch.Tensor = self._open[self._file_of[name]].get_tensor(name)
        return tensor

    def dtype_name(self, name: str) -> str:
        """Return the stored type of one tensor: "float32", "bfloat16" or "float16".

        Raises:
            ModelLoadError: there is no such tensor, or it has another type.
        """
        stored = self.stored_type(name)
        if stored is None:
            raise ModelLoadError(f"{self._folder}: tensor {name!r} is missing")
        if stored not in DTYPES:
            message = f"type {stored} is not supported, only {', '.join(DTYPES)}"
            if stored == STORED_FLOAT8:
                message += (
                    f"; {stored} is for projections, in a checkpoint whose config.json has a "
                    "quantization_config with quant_method 'fp8'"
                )
            raise ModelLoadError(f"{self._where(name)}: {message}")
        return DTYPES[stored]

    def stored_type(self, name: str) -> str | None:
        """Return the type of one tensor as safetensors calls it; None if it is not there."""
        if name not in self._file_of:
            return None
        stored: str = self._header(name).get_dtype()
        return stored

    def _where(self, name: str) -> str:
        return f"{self._folder / self._file_of[name]}: tensor {name!r}"

    def _header(self, name: str) -> Any:
        return self._open[self._file_of[name]].get_slice(name)

    def _file_names(self) -> list[str]:
        if (self._folder / SINGLE_FILE).exists():
            return [SINGLE_FILE]
        index = self._folder / INDEX_FILE
        if not index.exists():
            raise ModelLoadError(self._nothing_to_read())
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelLoadError(f"{index}: entry 'weight_map' is missing")
        names = sorted({str(name) for name in weight_map.values()})
        for name in names:
            # An index is untrusted input: it must not point out of its folder or at a pickle.
            if Path(name).name != name or not name.endswith(".safetensors"):
                raise ModelLoadError(f"{index}: {name!r} is not the name of a safetensors file")
        return names

    def _nothing_to_read(self) -> str:
        pickles = sorted(
            path.name for ext in ("*.bin", "*.pt", "*.pth") for path in self._folder.glob(ext)
        )
        message = f"{self._folder} has neither {SINGLE_FILE} nor {INDEX_FILE}"
        if pickles:
            message += (
                f"; {pickles[0]} is a pickle, which can run code when it is read: convert it to "
                "safetensors first"
            )
        return message


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except FileNotFoundError:
        raise ModelLoadError(f"{path} is missing, but the index names it") from None
    except (SafetensorError, OSError) as error:
        raise ModelLoadError(f"{path} is damaged or not safetensors: {error}") from None
