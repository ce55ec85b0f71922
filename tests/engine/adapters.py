"""Adapters for fake models: folders with a file that says which nonsense they make."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from qwen3_asgi.testing.engine import fake_adapter
from qwen3_asgi.testing.fake_executor import generate
from tests.engine.engines import VOCAB, tokens

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from qwen3_asgi.engine.engine import Engine

PROMPT = list(range(2, 40))  # two full blocks and a part of one


def write_adapter(folder: Path, says: str, *, rank: int = 4) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({"r": rank, "says": says}))
    return folder


def expected_with(folder: Path, prompt: Sequence[int], count: int) -> list[int]:
    """What the fake model answers with the adapter that is in the folder now."""
    settings = (folder / "adapter_config.json").read_bytes()
    weights = fake_adapter(lambda *_: settings).weights
    assert isinstance(weights, int)
    return generate(prompt, count, VOCAB, weights)


async def say(engine: Engine, adapter: str | None, count: int = 12) -> list[int]:
    """The engine's answer to `PROMPT`."""
    output = await engine.generate(prompt_token_ids=PROMPT, params=tokens(count), adapter=adapter)
    return list(output.token_ids)
