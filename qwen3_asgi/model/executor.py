"""`TorchExecutor`: the scheduler's `ModelExecutor` on torch, and the function that loads one."""

from __future__ import annotations

import logging
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from qwen3_asgi.model.batch import build_batch
from qwen3_asgi.model.config import ModelConfig, load_generation_defaults, load_model_config
from qwen3_asgi.model.cuda.steps import open_steps
from qwen3_asgi.model.dummy import DummyCheckpoint
from qwen3_asgi.model.fp8.checkpoint import open_checkpoint
from qwen3_asgi.model.heap import give_back
from qwen3_asgi.model.invariant import invariant_linear, invariant_operators, order_of
from qwen3_asgi.model.kv import KVPool
from qwen3_asgi.model.lora import AdaptedRows, Adapter
from qwen3_asgi.model.memory import choose_device, choose_dtype, choose_threads, pool_blocks
from qwen3_asgi.model.quantization import choose_linear
from qwen3_asgi.model.qwen3 import Qwen3
from qwen3_asgi.model.sampler import RowError, Sampler
from qwen3_asgi.model.shapes import DEFAULTS as DUMMY_DEFAULTS
from qwen3_asgi.model.streams import ThreadStreams
from qwen3_asgi.model.tiers import open_tiers
from qwen3_asgi.model.upload import upload
from qwen3_asgi.model.weights import EMBEDDING, load_weights
from qwen3_asgi.scheduler.pending import PendingTokens
from qwen3_asgi.scheduler.plan import SampledToken, StepResult

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from qwen3_asgi.config import EngineConfig
    from qwen3_asgi.model.batch import Batch
    from qwen3_asgi.model.config import GenerationDefaults
    from qwen3_asgi.model.cuda.steps import CudaSteps
    from qwen3_asgi.model.tiers import TorchTiers
    from qwen3_asgi.scheduler.executor import KVTiers, ModelExecutor
    from qwen3_asgi.scheduler.plan import RequestId, Row, RunningStep, StepPlan

logger = logging.getLogger(__name__)
# Says when each stage of a start begins, see `engine.loading`.
startup = logging.getLogger("qwen3_asgi.startup")


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
        tiers: TorchTiers | None = None,
        batch_invariant: bool = False,
        cuda: CudaSteps | None = None,
    ) -> None:
        self.model_config = model_config
        self.generation_defaults = generation_defaults
        self.device = device
        self.dtype = dtype
        self._loaded: tuple[Qwen3, KVPool] | None = (model, pool)
        self._sampler = sampler
        self._tiers = tiers
        self._batch_invariant = batch_invariant
        self._cuda = cuda
        self._adapters: dict[str, Adapter] = {}
        self._pending = PendingTokens()
        self._streams = ThreadStreams(device)
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

    @property
    def tiers(self) -> KVTiers | None:
        return self._tiers

    def on_landed(self, wake: Callable[[], None]) -> None:
        if self._tiers is not None:
            self._tiers.wake = wake

    def step(self, plan: StepPlan) -> StepResult | RunningStep:
        """Forward every row and sample where asked; on CUDA mostly without waiting for the device.

        Raises:
            ValueError: a row that cannot be run; nothing was written then.
            MemoryError: the device has no memory left for this step.
            RuntimeError: the executor is closed, or torch failed.
        """
        try:
            with self._streams.own() as turn:
                step = self._step(plan)
                turn.waits = isinstance(step, StepResult)
                return step
        except torch.OutOfMemoryError as error:
            message = str(error)
        # Only here: the error's traceback held what the step had computed so far.
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        logger.error("a step of %d tokens found no device memory: %s", plan.num_tokens, message)
        raise MemoryError(
            f"the device has no memory left for a step of {plan.num_tokens} tokens; lower "
            f"max_prefill_tokens, max_batch or num_kv_blocks"
        )

    @torch.inference_mode()
    def _step(self, plan: StepPlan) -> StepResult | RunningStep:
        if self._cuda is not None:
            if not self._cuda.decode.takes(plan):
                return self._cuda.step(plan, self._forward)
            with self._writing():
                return self._cuda.decode.step(plan)
        if plan.kind == "prefill":
            return self._run(plan.rows)
        rows, missing = self._pending.settle(plan)
        result = self._run(rows) if rows else StepResult({})
        self._pending.note(plan, result)
        return StepResult(result.tokens, {**result.errors, **missing}) if missing else result

    def _run(self, rows: Sequence[Row]) -> StepResult:
        # The last layer and the vocabulary product are much of a small model: only rows that sample
        # pay for them.
        _, hidden, model = self._forward(rows, sampling_only=True)
        sampled = [(row.request_id, row.sample) for row in rows if row.sample is not None]
        if not sampled:
            return StepResult({})
        results = self._sampler.sample(model.logits(hidden), [spec for _, spec in sampled])
        tokens: dict[RequestId, SampledToken] = {}
        errors: dict[RequestId, str] = {}
        for (request_id, _), result in zip(sampled, results, strict=True):
            if isinstance(result, RowError):
                errors[request_id] = result.message
            else:
                tokens[request_id] = result
        return StepResult(tokens, errors)

    @torch.inference_mode()
    def forward_logits(self, rows: Sequence[Row]) -> torch.Tensor:
        """Forward rows like `step` and return every token's logits, float32 `[T, vocab]`."""
        with self._streams.own():
            _, hidden, model = self._forward(rows)
            return model.logits(hidden).float()

    def load_adapter(self, name: str, adapter: object) -> None:
        """Make an adapter of `lora.read_adapter` known.

        Raises:
            TypeError: it is something else.
        """
        if not isinstance(adapter, Adapter):
            raise TypeError(f"adapter {name!r} is a {type(adapter).__name__}, no Adapter")
        adapter = adapter.to(self.device, self.dtype)
        if self._batch_invariant:
            adapter = adapter.multiplied_by(invariant_linear)
        self._adapters[name] = adapter

    def unload_adapter(self, name: str) -> None:
        del self._adapters[name]

    @torch.inference_mode()
    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        _, pool = self._open()
        with self._streams.own(), self._writing():
            pool.copy_blocks([source for source, _ in pairs], [target for _, target in pairs])

    def drop_request(self, request_id: RequestId) -> None:
        """Nothing is kept by request: blocks are the scheduler's, sampling has no state."""

    def close(self) -> None:
        if self._tiers is not None:
            self._tiers.close()
        self._loaded = self._cuda = None

    def _open(self) -> tuple[Qwen3, KVPool]:
        if self._loaded is None:
            raise RuntimeError("the executor is closed")
        return self._loaded

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """What is done here writes to KV blocks: copies that read them come before or after it."""
        if self._tiers is None:
            yield
            return
        self._tiers.before_step()
        try:
            yield
        finally:
            self._tiers.after_step()

    def _forward(
        self,
        rows: Sequence[Row],
        change: Callable[[Batch], None] | None = None,
        *,
        sampling_only: bool = False,
    ) -> tuple[Batch, torch.Tensor, Qwen3]:
        """Run the layers; `change` is called with the batch before. With `sampling_only` there is
        one hidden state for each row that samples."""
        model, pool = self._open()
        batch = build_batch(
            rows,
            vocab_size=self.model_config.vocab_size,
            block_size=pool.block_size,
            num_blocks=pool.num_blocks,
            max_tokens=self._max_context_tokens,
            device=self.device,
            paged=model.operators.reads_tables,
        )
        adapted = self._adapted(rows)
        if change is not None:
            change(batch)
        wanted = None
        if sampling_only:
            lasts = zip(rows, batch.last_rows, strict=True)
            wanted = [last for row, last in lasts if row.sample is not None]
        with self._writing():
            return batch, model.forward(batch, pool, adapted, wanted), model

    def _adapted(self, rows: Sequence[Row]) -> list[AdaptedRows]:
        """Which rows of the flattened batch run with which adapter."""
        found: dict[str, list[int]] = {}
        first = 0
        for row in rows:
            end = first + len(row.token_ids)
            if row.adapter is not None:
                found.setdefault(row.adapter, []).extend(range(first, end))
            first = end
        return [
            AdaptedRows(self._adapters[name], upload(indices, torch.int64, self.device))
            for name, indices in found.items()
        ]


if TYPE_CHECKING:
    _conforms: type[ModelExecutor] = TorchExecutor


def load_executor(
    folder: Path | ModelConfig, config: EngineConfig, *, owned_token_ids: int | Collection[int]
) -> TorchExecutor:
    """Load a checkpoint folder and allocate its KV pool.

    Args:
        folder: holds `config.json` and safetensors files (see `checkpoint.find_folder`). With
            `load_format="dummy"` the files are not needed, and a shape will do for a folder.
        config: `num_threads` sets torch's thread count for the whole process (`choose_threads`).
        owned_token_ids: ids that stand for a token (an int n: `0 … n-1`); others are not sampled.

    Raises:
        ModelLoadError: unsupported or damaged checkpoint, unknown device, or too little memory.
    """
    if isinstance(folder, ModelConfig):
        model_config, defaults, folder = folder, DUMMY_DEFAULTS, Path()
    else:
        model_config = load_model_config(folder)
        defaults = load_generation_defaults(folder, model_config)
    device = choose_device(config.device)
    threads = choose_threads(config.num_threads, model_config, device.type)
    if threads is not None:
        torch.set_num_threads(threads)
    checkpoint = open_checkpoint(folder, model_config) if config.load_format == "auto" else None
    stored = model_config.dtype or (
        "bfloat16" if checkpoint is None else checkpoint.dtype_name(EMBEDDING)
    )
    dtype = choose_dtype(config.dtype, stored, model_config, device.type)
    if "float16" in (config.dtype, stored) and dtype == torch.float32 and config.dtype != "float32":
        logger.warning("float16 is slow on a CPU; computing in float32, at twice the memory")
    max_tokens = model_config.max_context_tokens
    if config.max_context_tokens is not None:
        max_tokens = min(max_tokens, config.max_context_tokens)
    operators = None
    # What else than the weights makes kept KV blocks what they are.
    ways: str | None = config.quantization
    linear = choose_linear(config.quantization, device, invariant=config.batch_invariant)
    if config.batch_invariant:
        operators = invariant_operators(model_config, dtype, device)
        ways = f"{ways} {order_of(operators, dtype, device)}"
    # Kernels are launched on the current device, which is another thread's business elsewhere.
    current = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
    with torch.inference_mode(), current:
        startup.debug("weights")
        source = checkpoint or DummyCheckpoint(model_config, dtype, device)
        weights = load_weights(source, model_config, dtype, device, linear)
        give_back()
        startup.debug("kv pool")
        num_blocks = pool_blocks(model_config, config, max_tokens, dtype, str(device))
        pool = KVPool(model_config, num_blocks, config.block_size, dtype, device)
        startup.debug("model")
        model = Qwen3(model_config, weights, operators)
        sampler = Sampler(model_config.vocab_size, owned_token_ids, device)
        cuda = None
        if device.type == "cuda":
            startup.debug("graphs")
            cuda = open_steps(
                model,
                pool,
                model_config,
                sampler.unowned,
                max_batch=config.max_batch,
                max_tokens=max_tokens,
            )
        return TorchExecutor(
            model,
            pool,
            sampler,
            model_config=model_config,
            generation_defaults=defaults,
            max_context_tokens=max_tokens,
            device=device,
            dtype=dtype,
            tiers=open_tiers(folder, source.file_names, model_config, config, pool, ways),
            batch_invariant=config.batch_invariant,
            cuda=cuda,
        )
