"""What the machine can do at most: bytes read and operations per second, measured here and now."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch

from qwen3_asgi.model.cpu.arena import Arena
from qwen3_asgi.model.linear import Linear

if TYPE_CHECKING:
    from collections.abc import Callable

    from qwen3_asgi.model.config import ModelConfig

# Far more than any cache holds.
READ_BYTES = {"cpu": 1 << 29, "cuda": 1 << 32}
PROBE_SECONDS = 0.3
GEMM_ROWS = {"cpu": 512, "cuda": 4096}
GEMM_WIDTH = {"cpu": 4096, "cuda": 8192}


def clock(device: torch.device) -> float:
    """Seconds, when all that was launched has been done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


class Probes:
    """Both probes with torch's present number of threads. `best_*` are the best of all calls: a
    limit is what was reached at least once, and a machine that is disturbed only falls short."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._device = device
        self.best_bytes_per_second = 0.0
        self.best_flops_per_second = 0.0
        kind = device.type
        count = READ_BYTES[kind] // 4
        # In large pages, as the weights are.
        memory = Arena().empty(count, torch.float32) if kind == "cpu" else None
        self._memory = torch.empty(count, device=device) if memory is None else memory
        self._memory.fill_(1.0)
        width = GEMM_WIDTH[kind]
        self._weight = torch.full((width, width), 0.01, dtype=dtype, device=device)
        self._linear = Linear(self._weight.clone())
        self._rows = torch.full((GEMM_ROWS[kind], width), 0.01, dtype=dtype, device=device)
        self._flops = 2.0 * self._rows.shape[0] * self._weight.numel()

    @torch.inference_mode()
    def run(self) -> None:
        """Measure once more, in about a second."""
        memory, rows = self._memory, self._rows
        reads: tuple[Callable[[], object], ...] = (memory.sum, memory.amax)
        for read in reads:
            rate = memory.nbytes / self._fastest(read)
            self.best_bytes_per_second = max(self.best_bytes_per_second, rate)
        for product in (lambda: self._linear(rows), lambda: rows @ self._weight.T):
            rate = self._flops / self._fastest(product)
            self.best_flops_per_second = max(self.best_flops_per_second, rate)

    @torch.inference_mode()
    def once(self) -> tuple[float, float]:
        """Bytes and operations per second of one call each: what there is at this moment."""
        return (
            self._memory.nbytes / self._seconds(self._memory.sum),
            self._flops / self._seconds(lambda: self._linear(self._rows)),
        )

    def _fastest(self, call: Callable[[], object]) -> float:
        """Seconds of the fastest of at least two calls."""
        fastest = float("inf")
        until = time.perf_counter() + PROBE_SECONDS
        calls = 0
        while calls < 2 or time.perf_counter() < until:
            fastest = min(fastest, self._seconds(call))
            calls += 1
        return fastest

    def _seconds(self, call: Callable[[], object]) -> float:
        begin = clock(self._device)
        call()
        return clock(self._device) - begin


def linear_weights(config: ModelConfig) -> int:
    """Values of all matrices that a token is multiplied with, the vocabulary's included."""
    embedding = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
    return config.num_parameters - embedding


def step_bytes(
    config: ModelConfig, weight_bytes: int, kv_bytes: int, batch: int, context: int
) -> int:
    """What a decode step must read: every matrix once, and the keys and values of its rows.

    `weight_bytes` and `kv_bytes` are those of one value.
    """
    kv = 2 * config.num_layers * config.num_kv_heads * config.head_dim * batch * context
    return linear_weights(config) * weight_bytes + kv * kv_bytes


def forward_flops(config: ModelConfig, tokens: int, keys: int, sampled: int) -> int:
    """Operations that a forward pass over `tokens` rows must do, with `keys` attended pairs per
    head: `sampled` rows are multiplied with the vocabulary, and only they go through the last
    layer's output and MLP."""
    vocabulary = config.vocab_size * config.hidden_size
    layers = (linear_weights(config) - vocabulary) * tokens
    heads = config.num_heads * config.head_dim
    after_keys = config.hidden_size * (heads + 3 * config.intermediate_size)
    layers -= after_keys * (tokens - sampled)
    attention = 2 * config.num_layers * heads * keys
    return 2 * (layers + attention + vocabulary * sampled)
