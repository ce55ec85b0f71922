"""The bundled model: a real, very small Qwen3 that a script in this folder trained.

`tiny_path()` is all that the engine needs; nothing here imports torch or transformers.
"""

from pathlib import Path

__all__ = ["tiny_path"]


def tiny_path() -> Path:
    """The folder with config.json, model.safetensors and the tokenizer files."""
    return Path(__file__).parent / "weights"
