"""From a model's name to what an engine needs of it. The one place that reaches into `model/`."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from qwen3_asgi.config import EngineConfig

if TYPE_CHECKING:
    from qwen3_asgi.scheduler.executor import ModelExecutor
    from qwen3_asgi.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What a request gets for the sampling fields it leaves out. Fields as in `SamplingParams`."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


class ReadAdapter(NamedTuple):
    """A LoRA adapter for the executor's `load_adapter`, and what is told about it."""

    weights: object
    rank: int
    fingerprint: str


# Returns the content of a file of the adapter's folder, given its name and its greatest size.
ReadFile = Callable[[str, int], bytes]
AdapterReader = Callable[[ReadFile], ReadAdapter]


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that is ready to run.

    `read_adapter` may be called on any thread; it raises `InvalidRequest` for what is no adapter.
    None: the model takes no adapters.
    """

    executor: ModelExecutor
    tokenizer: Tokenizer
    eos_token_ids: tuple[int, ...]
    defaults: SamplingDefaults
    read_adapter: AdapterReader | None = None


# Says when each stage of a start begins, by the stage's name alone: for `bench startup`.
startup = logging.getLogger("qwen3_asgi.startup")

# Called on the scheduler thread with the model's name and the engine's configuration.
Loader = Callable[[str, EngineConfig], LoadedModel]


def load_model(name: str, config: EngineConfig) -> LoadedModel:
    """Load "tiny" (bundled), a local folder, or a Hugging Face hub id.

    With `load_format="dummy"` the folder needs no weights, and in the place of a hub id is the
    name of a shape (`model/shapes.py`). What has no tokenizer is given the bundled model's.

    Raises:
        ModelLoadError: the checkpoint cannot be used; the message says why.
    """
    startup.debug("torch")
    from qwen3_asgi.model.checkpoint import find_folder
    from qwen3_asgi.model.config import load_model_config
    from qwen3_asgi.model.executor import load_executor
    from qwen3_asgi.model.lora import read_adapter
    from qwen3_asgi.model.shapes import named_shape
    from qwen3_asgi.text.tokenizer import Tokenizer
    from qwen3_asgi.tiny import tiny_path

    folder: Path | None
    if name == "tiny":
        folder = Path(tiny_path())
    elif config.load_format == "dummy" and not Path(name).expanduser().exists():
        folder = None
    else:
        folder = find_folder(name)
    startup.debug("tokenizer")
    # First: a wrong architecture explains whatever else is missing.
    shape = named_shape(name) if folder is None else load_model_config(folder)
    if config.load_format == "auto" and folder is not None:
        tokenizer = Tokenizer.from_folder(folder)
    else:
        own = folder if folder is not None and (folder / "tokenizer.json").is_file() else None
        tokenizer = Tokenizer.from_folder(own or tiny_path(), vocab_size=shape.vocab_size)
    executor = load_executor(folder or shape, config, owned_token_ids=tokenizer.owned_token_ids)
    generation = executor.generation_defaults
    defaults = SamplingDefaults()
    if config.generation_config == "auto":
        defaults = SamplingDefaults(
            temperature=generation.temperature,
            top_k=generation.top_k,
            top_p=generation.top_p,
            min_p=generation.min_p,
        )

    def read_lora(read: ReadFile) -> ReadAdapter:
        adapter, fingerprint = read_adapter(read, executor.model_config)
        return ReadAdapter(adapter, adapter.rank, fingerprint)

    return LoadedModel(executor, tokenizer, tuple(generation.eos_token_ids), defaults, read_lora)


def served_name(model: str, config: EngineConfig) -> str:
    """The name that requests and metrics use."""
    if config.served_model_name is not None:
        return config.served_model_name
    return Path(model).resolve().name if Path(model).is_dir() else model
