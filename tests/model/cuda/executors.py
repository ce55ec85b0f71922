"""Executors that run in the CUDA kernels: on a card with graphs, else in Triton's interpreter."""

from __future__ import annotations

import threading

import pytest
import torch

from qwen3_asgi.model.cuda.operators import CudaOperators
from qwen3_asgi.model.cuda.steps import open_steps
from qwen3_asgi.scheduler.plan import PENDING, StepResult
from tests.model.checkpoints import load
from tests.model.cuda.world import DEVICE

MAX_BATCH = 8


def needs_card(test):
    """For tests of what only a card can show."""
    skip = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
    return pytest.mark.cuda(skip(test))


def load_on_kernels(folder, **settings):
    """`checkpoints.load`, but on the card; without one, its kernels take CPU tensors instead, and
    what a graph would replay is called."""
    settings = {"max_batch": MAX_BATCH, "dtype": "float32"} | settings
    if DEVICE.type == "cuda":
        executor = load(folder, device="cuda", **settings)
        assert executor._cuda is not None
        return executor
    executor = load(folder, **settings)
    model, pool = executor._loaded
    config = executor.model_config
    model.operators = CudaOperators(
        config.num_heads, config.num_kv_heads, config.head_dim, config.rms_norm_eps
    )
    executor._cuda = open_steps(
        model,
        pool,
        config,
        executor._sampler.unowned,
        max_batch=settings["max_batch"],
        max_tokens=executor.max_context_tokens,
        capture=lambda run: run,
    )
    return executor


class Watched:
    """Passes steps on, one at a time: the interpreter patches Triton's language while it runs.

    Keeps what a test wants to have seen: how many steps were still running when they were
    returned, how many tokens were pending, and the kinds of the plans.
    """

    def __init__(self, executor):
        self._executor = executor
        self._lock = threading.Lock()
        self.running = 0
        self.pending = 0
        self.kinds = set()

    def __getattr__(self, name):
        return getattr(self._executor, name)

    def step(self, plan):
        with self._lock:
            self.kinds.add(plan.kind)
            self.pending += sum(row.token_ids[0] == PENDING for row in plan.rows)
            step = self._executor.step(plan)
            self.running += not isinstance(step, StepResult)
            return step
