"""The `quantization_config` of a `config.json`: float8 in blocks, or an error that says what else.

The names and defaults are those of transformers' `FineGrainedFP8Config`, which wrote the files.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from qwen3_asgi.errors import ModelLoadError
from qwen3_asgi.model.fp8.blocks import BLOCK

if TYPE_CHECKING:
    from collections.abc import Mapping

METHOD = "fp8"
# What an entry may say, which is also what its absence means. Others than these do not matter:
# `modules_to_not_convert` follows from the types that the tensors are stored in.
ENTRIES: dict[str, Any] = {
    "fmt": "e4m3",
    "weight_block_size": [BLOCK, BLOCK],
    "activation_scheme": "dynamic",
    "scale_fmt": "float",
}


def parse_quantization(raw: Mapping[str, Any]) -> bool:
    """Return whether a `config.json` announces matrices in float8 blocks.

    Raises:
        ModelLoadError: it announces another kind of quantisation.
    """
    entry = raw.get("quantization_config")
    if not entry:
        return False
    if not isinstance(entry, dict):
        raise ModelLoadError(f"entry 'quantization_config' must be an object, found {entry!r}")
    # The other methods' entries mean nothing here, so the method is looked at first.
    for key, allowed in {"quant_method": METHOD, **ENTRIES}.items():
        found = entry.get(key, None if key == "quant_method" else allowed)
        if found != allowed:
            raise ModelLoadError(
                f"quantization_config: {key} {found!r} is not supported, only {allowed!r}"
            )
    return True
