"""The peer that everybody has: a forward loop of transformers on the same weights.

`Qwen3ForCausalLM` with SDPA attention and a `DynamicCache`. The cache is filled with random values:
to decode, it only matters how long it is.
"""

from __future__ import annotations

import inspect
import json
from typing import TYPE_CHECKING, Any

import torch

from qwen3_asgi.model.dummy import DummyCheckpoint
from qwen3_asgi.model.dummy_folder import sizes_json
from qwen3_asgi.model.fp8.checkpoint import open_checkpoint
from qwen3_asgi.model.probes import clock
from qwen3_asgi.model.weights import LM_HEAD, tensor_shapes

if TYPE_CHECKING:
    from pathlib import Path

    from qwen3_asgi.model.config import ModelConfig


class PlainLoop:
    """A model of transformers. `folder` is the checkpoint's; None: dummy weights of `config`.

    Raises:
        ValueError: transformers is not installed.
    """

    def __init__(
        self,
        config: ModelConfig,
        folder: Path | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        try:
            import transformers
        except ModuleNotFoundError as error:
            raise ValueError("comparing needs transformers: pip install transformers") from error
        self._cache_type: Any = transformers.DynamicCache
        self._config = config
        self._dtype = dtype
        self._device = device
        if folder is None:
            raw: dict[str, Any] = {
                "rope_parameters": {"rope_type": "default", "rope_theta": config.rope.theta}
            }
        else:
            raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        raw |= sizes_json(config)
        self._hf_config = transformers.Qwen3Config(**raw)
        self._hf_config._attn_implementation = "sdpa"
        source = (
            DummyCheckpoint(config, dtype, device)
            if folder is None
            else open_checkpoint(folder, config)
        )
        state = {
            name: source.read(name).to(device, dtype)
            for name in tensor_shapes(config)
            if not (name == LM_HEAD and config.tie_word_embeddings)
        }
        default = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            with torch.device("meta"):
                model: Any = transformers.Qwen3ForCausalLM(self._hf_config)
        finally:
            torch.set_default_dtype(default)
        model.load_state_dict(state, strict=False, assign=True)
        model.tie_weights()
        # What is no weight was made without memory, too: the frequencies of RoPE.
        rotary = type(model.model.rotary_emb)
        model.model.rotary_emb = rotary(self._hf_config).to(device)
        left = [name for name, each in model.named_parameters() if each.is_meta]
        if left:
            raise ValueError(f"transformers wants weights that are not there: {left[:3]}")
        self.model = model.eval()
        # transformers 5 renames the argument.
        named = inspect.signature(model.forward).parameters
        self._cache_name = "cache" if "cache" in named else "past_key_values"

    @torch.inference_mode()
    def cache(self, batch: int, tokens: int) -> Any:
        """A cache that holds `tokens` positions of each of `batch` sequences."""
        config = self._config
        cache = self._cache_type(config=self._hf_config)
        shape = (batch, config.num_kv_heads, tokens, config.head_dim)
        for layer in range(config.num_layers):
            keys, values = (
                torch.randn(shape, dtype=torch.float32, device=self._device).to(self._dtype)
                for _ in range(2)
            )
            cache.update(keys, values, layer)
        return cache

    @torch.inference_mode()
    def decode(self, ids: torch.Tensor, cache: Any) -> torch.Tensor:
        """One more token for each sequence: the greedy ones after `ids` `[B, 1]`."""
        held = {self._cache_name: cache}
        logits = self.model(ids, **held, use_cache=True, logits_to_keep=1).logits
        best: torch.Tensor = logits[:, -1:].argmax(-1)
        return best

    @torch.inference_mode()
    def prefill(self, token_ids: list[int]) -> int:
        """A prompt's forward pass into a new cache; the greedy token after it."""
        ids = torch.tensor([token_ids], device=self._device)
        cache = self._cache_type(config=self._hf_config)
        return int(self.decode(ids, cache)[0, 0])

    def first(self, batch: int) -> torch.Tensor:
        """Some tokens to begin with, `[batch, 1]`."""
        return torch.ones((batch, 1), dtype=torch.int64, device=self._device)

    @property
    def device(self) -> torch.device:
        return self._device


class LoopPeer:
    """A `stepping.StepPeer`. The cache is cut back after each step."""

    name = "transformers"

    def __init__(self, loop: PlainLoop) -> None:
        self._loop = loop
        self._cache: Any = None
        self._ids = loop.first(1)

    def prepare(self, batch: int, context: int) -> None:
        self._cache = None  # before the next one is made
        self._cache = self._loop.cache(batch, context - 1)
        self._ids = self._loop.first(batch)

    def decode(self) -> float:
        begin = clock(self._loop.device)
        self._loop.decode(self._ids, self._cache)
        seconds = clock(self._loop.device) - begin
        self._cache.crop(-1)
        return seconds

    def prefill(self, prompt: list[int]) -> float:
        begin = clock(self._loop.device)
        self._loop.prefill(prompt)
        return clock(self._loop.device) - begin

    def close(self) -> None:
        self._cache = None
