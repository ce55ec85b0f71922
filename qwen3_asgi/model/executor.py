"""`TorchExecutor`: the scheduler's `ModelExecutor` on torch, and the function that loads one."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from qwen3_asgi.model.batch import build_batch
from qwen3_asgi.model.checkpoint import Checkpoint
from qwen3_asgi.model.config import load_generation_defaults, load_model_config
from qwen3_asgi.model.kv import KVPool
from qwen3_asgi.model.memory import choose_device, choose_dtype, choose_threads, pool_blocks
from qwen3_asgi.model.qwen3 import Qwen3
from qwen3_asgi.model.sampler import RowError, Sampler
from qwen3_asgi.model.weights import EMBEDDING, load_weights
from qwen3_asgi.scheduler.plan import SampledToken, StepResult

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from pathlib import Path

    from qwen3_asgi.config import EngineConfig
    from qwen3_asgi.model.batch import Batch
    from qwen3_asgi.model.config import GenerationDefaults, ModelConfig
    from qwen3_asgi.scheduler.executor import ModelExecutor
    from qwen3_asgi.scheduler.plan import RequestId, Row, StepPlan

logger = logging.getLogger(__name__)


class TorchExecutor:
    """Runs steps of one model. Owned by the scheduler thread; see `ModelExecutor`.

    `model_config` and `generation_defaults` are the checkpoint's and may be read from any thread.
    """

    def __init__(
        self,
        model: Qwen3,
        pool: KVPool,
        sampler: Sampler,
        *,
        model_config: ModelConfig,
        generation_defaults: GenerationDefaults,
        max_context_tokens: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.model_config = model_config
        self.generation_defaults = generation_defaults
        self.device = device
        self.dtype = dtype
        self._loaded: tuple[Qwen3, KVPool] | None = (model, pool)
        self._sampler = sampler
        self._block_size = pool.block_size
        self._num_kv_blocks = pool.num_blocks
        self._max_context_tokens = max_context_tokens

    @property
    def block_size(self) -> int:
        return self._block_size

    @property
    def num_kv_blocks(self) -> int:
        return self._num_kv_blocks

    @property
    def max_context_tokens(self) -> int:
        return self._max_context_tokens

    @torch.inference_mode()
    def step(self, plan: StepPlan) -> StepResult:
        """Forward every row and sample where asked.

        Raises:
            ValueError: a row that cannot be run; nothing was written then.
            RuntimeError: the executor is closed, or torch failed.
        """
        batch, hidden, model = self._forward(plan.rows)
        sampled = [
            (row.request_id, last, row.sample)
            for row, last in zip(plan.rows, batch.last_rows, strict=True)
            if row.sample is not None
        ]
        if not sampled:
            return StepResult({})
        # The vocabulary product is a quarter of a small model: only rows that sample pay for it.
        logits = model.logits(hidden[[last for _, last, _ in sampled]])
        results = self._sampler.sample(logits, [spec for _, _, spec in sampled])
        tokens: dict[RequestId, SampledToken] = {}
        errors: dict[RequestId, str] = {}
        for (request_id, _, _), result in zip(sampled, results, strict=True):
            if isinstance(result, RowError):
                errors[request_id] = result.message
            else:
                tokens[request_id] = result
        return StepResult(tokens, errors)

    @torch.inference_mode()
    def forward_logits(self, rows: Sequence[Row]) -> torch.Tensor:
        """Forward rows like `step` and return every token's logits, float32 `[T, vocab]`."""
        _, hidden, model = self._forward(rows)
        return model.logits(hidden)

    def drop_request(self, request_id: RequestId) -> None:
        """Nothing is kept by request: blocks are the scheduler's, sampling has no state."""

    def close(self) -> None:
        self._loaded = None

    def _forward(self, rows: Sequence[Row]) -> tuple[Batch, torch.Tensor, Qwen3]:
        if self._loaded is None:
            raise RuntimeError("the executor is closed")
        model, pool = self._loaded
        batch = build_batch(
            rows,
            vocab_size=self.model_config.vocab_size,
            block_size=pool.block_size,
            num_blocks=pool.num_blocks,
            max_tokens=self._max_context_tokens,
            device=self.device,
        )
        return batch, model.forward(batch, pool), model


if TYPE_CHECKING:
    _conforms: type[ModelExecutor] = TorchExecutor


def load_executor(
    folder: Path, config: EngineConfig, *, owned_token_ids: int | Collection[int]
) -> TorchExecutor:
    """Load a checkpoint folder and allocate its KV pool.

    Args:
        folder: holds `config.json` and safetensors files (see `checkpoint.find_folder`).
        config: `num_threads` sets torch's thread count for the whole process (`choose_threads`).
        owned_token_ids: ids that stand for a token (an int n: `0 … n-1`); others are not sampled.

    Raises:
        ModelLoadError: unsupported or damaged checkpoint, unknown device, or too little memory.
    """
    model_config = load_model_config(folder)
    defaults = load_generation_defaults(folder, model_config)
    device = choose_device(config.device)
    threads = choose_threads(config.num_threads, model_config, device.type)
    if threads is not None:
        torch.set_num_threads(threads)
    checkpoint = Checkpoint(folder)
    stored = model_config.dtype or checkpoint.dtype_name(EMBEDDING)
    dtype = choose_dtype(config.dtype, stored, model_config, device.type)
    if "float16" in (config.dtype, stored) and dtype == torch.float32 and config.dtype != "float32":
        logger.warning("float16 is slow on a CPU; computing in float32, at twice the memory")
    max_tokens = model_config.max_context_tokens
    if config.max_context_tokens is not None:
        max_tokens = min(max_tokens, config.max_context_tokens)
    with torch.inference_mode():
        weights = load_weights(checkpoint, model_config, dtype, device)
        num_blocks = pool_blocks(model_config, config, max_tokens, dtype, device.type)
        pool = KVPool(model_config, num_blocks, config.block_size, dtype, device)
        return TorchExecutor(
            Qwen3(model_config, weights),
            pool,
            Sampler(model_config.vocab_size, owned_token_ids, device),
            model_config=model_config,
            generation_defaults=defaults,
            max_context_tokens=max_tokens,
            device=device,
            dtype=dtype,
        )
