"""Ten concurrent requests on the bundled model, all dropped: 0/0 within two iterations, counted."""

from __future__ import annotations

import dataclasses
import threading

import pytest

from qwen3_asgi import Engine, EngineConfig, SamplingParams
from qwen3_asgi.engine.loading import load_model
from qwen3_asgi.testing import assert_idle

REQUESTS = 10
LONG = SamplingParams(max_tokens=1000, temperature=0, ignore_eos=True)


class HeldExecutor:
    """The real executor; while `go` is clear, a step that begins waits, and `held` says so."""

    def __init__(self, executor):
        self._executor = executor
        self.go = threading.Event()
        self.go.set()
        self.held = threading.Event()
        self.steps = 0

    def step(self, plan):
        self.steps += 1
        if not self.go.is_set():
            self.held.set()
            assert self.go.wait(60)
        return self._executor.step(plan)

    def __getattr__(self, name):
        return getattr(self._executor, name)


@pytest.mark.parametrize("prompt_words", [5, 200], ids=["decoding", "prefilling"])
def test_ten_dropped_requests_are_gone_within_two_iterations(prompt_words):
    held = []

    def load(name, config):
        model = load_model(name, config)
        held.append(HeldExecutor(model.executor))
        return dataclasses.replace(model, executor=held[0])

    with Engine("tiny", EngineConfig(num_kv_blocks=2048), loader=load) as engine:
        executor = held[0]
        handles = [
            engine.submit_sync(prompt=f"{index} " + "word " * prompt_words, params=LONG)
            for index in range(REQUESTS)
        ]
        first = handles[0].read_sync()
        next(first)  # at least one decodes; with long prompts others still wait or prefill
        executor.go.clear()
        assert executor.held.wait(60)
        before, steps = engine.load(), executor.steps
        assert before.num_running + before.num_waiting == REQUESTS
        first.close()
        handles.clear()
        executor.go.set()
        assert_idle(engine)
        after = engine.load()
        assert after.iteration - before.iteration <= 2
        assert executor.steps == steps
        follow_up = engine.generate_sync(prompt="1, 2, 3,", params=SamplingParams(max_tokens=4))
        assert follow_up.token_ids
