"""`bench make-model`: a checkpoint folder with random weights, for two servers to be compared on.

Both load the same files. Every token has a text of its own and none that ends an answer is ever the
best, so that a greedy answer has all the tokens it was asked for, and each of them can be seen.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from qwen3_asgi.tiny import tiny_path

if TYPE_CHECKING:
    from pathlib import Path

TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"


def make_model(name: str, folder: Path) -> int:
    """Write the folder; return the bytes of its weights.

    Args:
        name: one of the shapes of `load_format="dummy"`, as "Qwen3-0.6B", or "tiny".
        folder: new, or empty.

    Raises:
        ModelLoadError: no such shape; the message lists those there are.
        ValueError: there is something in the folder already.
    """
    from qwen3_asgi.model.config import load_model_config
    from qwen3_asgi.model.dummy_folder import write_dummy_folder
    from qwen3_asgi.model.shapes import named_shape

    config = load_model_config(tiny_path()) if name == "tiny" else named_shape(name)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} is not an empty folder: nothing was written")
    tokenizer = _filled_up(config.vocab_size)
    control = {token["content"]: int(token["id"]) for token in tokenizer["added_tokens"]}
    ends = (control["<|im_end|>"], control["<|endoftext|>"])
    config = replace(config, eos_token_ids=ends)
    size = write_dummy_folder(folder, config, sorted(control.values()))
    _write(folder / TOKENIZER, tokenizer)
    told = json.loads((tiny_path() / TOKENIZER_CONFIG).read_text(encoding="utf-8"))
    _write(folder / TOKENIZER_CONFIG, {**told, "model_max_length": config.max_position_embeddings})
    shutil.copy(tiny_path() / "generation_config.json", folder)
    return size


def _filled_up(vocab_size: int) -> dict[str, Any]:
    """The bundled tokenizer, with a made-up word for every id that has none.

    No merge makes these words: they are decoded, and never encoded.
    """
    tokenizer: dict[str, Any] = json.loads((tiny_path() / TOKENIZER).read_text(encoding="utf-8"))
    vocab: dict[str, int] = tokenizer["model"]["vocab"]
    # A control token keeps its id only if the vocabulary has it, too, or ends right before it.
    vocab |= {token["content"]: int(token["id"]) for token in tokenizer["added_tokens"]}
    taken = set(vocab.values())
    # "Ġ" is the space of a byte-level alphabet.
    vocab |= {f"Ġw{number}": number for number in range(vocab_size) if number not in taken}
    return tokenizer


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
