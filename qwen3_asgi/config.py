"""What a user sets: `EngineConfig` once per engine, `SamplingParams` once per request.

Both are frozen values that check themselves; nothing here reads the environment or a file.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from qwen3_asgi.errors import InvalidRequest

DType = Literal["auto", "float32", "bfloat16", "float16"]
ColdStart = Literal["wait", "refuse"]
LoadFormat = Literal["auto", "dummy"]
Quantization = Literal["int8"]

MAX_LOGPROBS = 20
# Far above `EngineConfig.max_n`, which says what an engine takes.
MAX_CHOICES = 1024
MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 256
MAX_STOP_TOKEN_IDS = 64


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Settings of one engine. Sizes are in tokens, blocks or requests as their names say.

    `device` is `"auto"` (CUDA when there is one, else CPU), `"cpu"` or `"cuda[:n]"`.
    `num_kv_blocks=None` sizes the KV pool from the memory that is free; on CUDA so that at most
    `gpu_memory_utilization` of the whole card are in use, by whomever. `max_context_tokens=None`
    takes the model's own limit; it is capped by what the KV pool can hold. `num_threads=None` runs
    small models on a CPU with one thread, whose steps are too short to share, and leaves torch's
    thread count alone otherwise. `generation_config="auto"` takes sampling defaults from the
    checkpoint's `generation_config.json`, `"openai"` uses temperature 1 and no truncation.
    `host_kv_gib` of host memory (0: none) take KV blocks that are evicted from the device, and
    behind it a file of `kv_file_gib`, if `kv_file` names one, which survives a restart.
    With `overlap`, prompts are computed beside decode steps, on a thread of their own, so that they
    hold up nobody's tokens; on a CPU both share its cores. With `pipelined`, too, a decode step is
    launched before the tokens of the last one are known. The device never waits for the host then,
    at the price of a row for nothing when a request ends in a way that could not be foreseen.
    `batch_invariant` gives a request the same logits to the last bit whatever else is in the batch,
    and however its prompt was cut, found in the prefix cache or computed again.
    `quantization="int8"` keeps the weights in 8 bits (CPU only): half the memory, and decoding few
    requests at almost twice the speed, for a small loss of accuracy.
    `max_adapters` is the most LoRA adapters at a time.
    `max_queue` bounds the requests that wait beyond a full batch, `max_queue_tokens` the prompt
    tokens that are not computed yet (None: no bound); more of them is `EngineOverloaded`. `max_n`
    is the most outputs that one request may ask for. `max_timeout` is in seconds, and the deadline
    also of requests that set none. After `max_failures` failed steps in a row the engine is dead.
    A step that takes more than `step_warn_seconds` (None: whatever it takes) is reported.
    `cold_start` is for requests that come while the model is being loaded: `"wait"` lets them wait,
    `"refuse"` answers with `EngineNotReady` all but the one that began the start.
    `load_format="dummy"` makes random weights up instead of reading some, for measuring: of a
    folder's `config.json`, or of a dense Qwen3 model by name (`"Qwen3-0.6B"`), with no download.
    `tracing` makes OpenTelemetry spans of requests, `trace_iterations` keeps a record of so many of
    the scheduler's last iterations (`Engine.trace`).
    """

    device: str = "auto"
    dtype: DType = "auto"
    block_size: int = 16
    num_kv_blocks: int | None = None
    gpu_memory_utilization: float = 0.9
    max_prefill_tokens: int = 512
    max_batch: int = 32
    max_context_tokens: int | None = None
    max_adapters: int = 32
    max_queue: int = 1024
    max_queue_tokens: int | None = None
    max_n: int = 16
    max_timeout: float | None = None
    max_failures: int = 8
    step_warn_seconds: float | None = 30.0
    prefix_cache: bool = True
    overlap: bool = False
    pipelined: bool = False
    batch_invariant: bool = False
    num_threads: int | None = None
    served_model_name: str | None = None
    generation_config: Literal["auto", "openai"] = "auto"
    host_kv_gib: float = 0.0
    kv_file: str | None = None
    kv_file_gib: float = 4.0
    cold_start: ColdStart = "wait"
    load_format: LoadFormat = "auto"
    quantization: Quantization | None = None
    tracing: bool = False
    trace_iterations: int = 0

    def __post_init__(self) -> None:
        for name in (
            "block_size",
            "max_prefill_tokens",
            "max_batch",
            "max_adapters",
            "max_queue",
            "max_n",
            "max_failures",
        ):
            _positive(name, getattr(self, name))
        for name in ("num_kv_blocks", "max_context_tokens", "num_threads", "max_queue_tokens"):
            if getattr(self, name) is not None:
                _positive(name, getattr(self, name))
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ValueError(
                "gpu_memory_utilization must be greater than 0 and at most 1, got "
                f"{self.gpu_memory_utilization}"
            )
        for name in ("max_timeout", "step_warn_seconds"):
            seconds = getattr(self, name)
            if seconds is not None and not 0 < seconds < math.inf:
                raise ValueError(f"{name} must be greater than 0, got {seconds}")
        if self.dtype not in ("auto", "float32", "bfloat16", "float16"):
            raise ValueError(
                f"dtype must be auto, float32, bfloat16 or float16, got {self.dtype!r}"
            )
        if self.generation_config not in ("auto", "openai"):
            raise ValueError(
                f"generation_config must be 'auto' or 'openai', got {self.generation_config!r}"
            )
        if not 0 <= self.host_kv_gib < math.inf:
            raise ValueError(f"host_kv_gib must be at least 0, got {self.host_kv_gib}")
        if not 0 < self.kv_file_gib < math.inf:
            raise ValueError(f"kv_file_gib must be greater than 0, got {self.kv_file_gib}")
        if self.kv_file == "":
            raise ValueError("kv_file must be a path or None")
        if not self.prefix_cache and (self.host_kv_gib or self.kv_file is not None):
            raise ValueError("host_kv_gib and kv_file are of no use without prefix_cache")
        if self.pipelined and not self.overlap:
            raise ValueError("pipelined needs overlap")
        if self.trace_iterations < 0:
            raise ValueError(f"trace_iterations must be at least 0, got {self.trace_iterations}")
        if self.cold_start not in ("wait", "refuse"):
            raise ValueError(f"cold_start must be 'wait' or 'refuse', got {self.cold_start!r}")
        if self.load_format not in ("auto", "dummy"):
            raise ValueError(f"load_format must be 'auto' or 'dummy', got {self.load_format!r}")
        if self.quantization not in (None, "int8"):
            raise ValueError(f"quantization must be 'int8' or None, got {self.quantization!r}")
        if self.load_format == "dummy" and self.kv_file is not None:
            # Its blocks are worth something only to the weights they were computed with.
            raise ValueError("kv_file is of no use with load_format='dummy'")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one request is sampled. `None` means: the model's default.

    `n` outputs share one computation of the prompt. The first is what `n=1` gives; the seeds of the
    others follow from its seed.

    Raises:
        InvalidRequest: a field is out of its range; `param` names it.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    n: int = 1

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        object.__setattr__(self, "stop", tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        _in_range("max_tokens", self.max_tokens, 1, None)
        _in_range("min_tokens", self.min_tokens, 0, self.max_tokens)
        _in_range("temperature", self.temperature, 0.0, 2.0)
        _in_range("top_k", self.top_k, -1, None)
        _in_range("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _in_range("min_p", self.min_p, 0.0, 1.0)
        _in_range("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        _in_range("n", self.n, 1, MAX_CHOICES)
        _in_range("seed", self.seed, -(2**63), 2**63 - 1)
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidRequest(
                f"stop takes at most {MAX_STOP_STRINGS} strings, got {len(self.stop)}",
                param="stop",
            )
        for text in self.stop:
            if not text or len(text) > MAX_STOP_STRING_CHARS:
                raise InvalidRequest(
                    f"each stop string must have 1 to {MAX_STOP_STRING_CHARS} characters",
                    param="stop",
                )
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise InvalidRequest(
                f"stop_token_ids takes at most {MAX_STOP_TOKEN_IDS} ids", param="stop_token_ids"
            )


def _positive(name: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")


def _in_range(
    name: str,
    value: float | None,
    low: float,
    high: float | None,
    *,
    open_low: bool = False,
) -> None:
    if value is None:
        return
    below = value <= low if open_low else value < low
    # `not (value == value)` catches NaN, which compares false with everything.
    if value != value or below or (high is not None and value > high):
        bound = f"greater than {low}" if open_low else f"at least {low}"
        limit = "" if high is None else f" and at most {high}"
        raise InvalidRequest(f"{name} must be {bound}{limit}, got {value}", param=name)
