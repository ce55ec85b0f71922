"""The same truth through the real scheduler: admission, chunking, sharing, preemption, cancels."""

from __future__ import annotations

import random

import pytest

from qwen3_asgi.scheduler.loop import Scheduler
from qwen3_asgi.scheduler.plan import Sampling
from qwen3_asgi.scheduler.request import Request
from tests.model.checkpoints import KINDS, VOCAB, greedy, load, load_reference, write_checkpoint

NEW_TOKENS = 16
GREEDY = Sampling(temperature=0.0)


class Sink:
    def __init__(self):
        self.tokens = {}
        self.finishes = {}

    def deliver(self, events):
        for event in events:
            if event.token is not None:
                self.tokens.setdefault(event.request_id, []).append(event.token.token_id)
            if event.finish is not None:
                assert event.request_id not in self.finishes
                self.finishes[event.request_id] = event.finish


class Preemptions:
    """An observer that only counts preemptions and cached tokens."""

    def __init__(self):
        self.preempted = 0
        self.cached = 0

    def on_preempt(self, request):
        self.preempted += 1

    def on_admit(self, request, cached_tokens):
        self.cached += cached_tokens

    def __getattr__(self, name):
        if name.startswith("on_"):
            return lambda *args, **kwargs: None
        raise AttributeError(name)


@pytest.fixture(scope="module", params=KINDS)
def world(request, tmp_path_factory):
    """A checkpoint, eight prompts (half with a shared prefix) and transformers' continuations."""
    folder = write_checkpoint(tmp_path_factory.mktemp(request.param), request.param)
    model = load_reference(folder)
    source = random.Random(11)
    shared = source.choices(range(VOCAB), k=13)
    prompts = [
        (shared if index % 2 else []) + source.choices(range(VOCAB), k=3 + 4 * index)
        for index in range(8)
    ]
    return folder, prompts, [greedy(model, prompt, NEW_TOKENS) for prompt in prompts]


def submit(scheduler, name, prompt, **more):
    scheduler.submit(Request(name, prompt, sampling=GREEDY, max_tokens=NEW_TOKENS, **more))


def run_to_idle(scheduler):
    while True:
        scheduler.iterate()
        scheduler.check_integrity()
        if scheduler.load.idle:
            return


@pytest.mark.parametrize("max_prefill_tokens", [1, 5, 512])
def test_batched_and_chunked_requests_match_transformers(world, max_prefill_tokens):
    folder, prompts, expected = world
    sink = Sink()
    scheduler = Scheduler(
        load(folder, num_kv_blocks=256), sink, max_prefill_tokens=max_prefill_tokens
    )
    for index, prompt in enumerate(prompts):
        submit(scheduler, f"r{index}", prompt)
    run_to_idle(scheduler)
    assert [sink.tokens[f"r{index}"] for index in range(len(prompts))] == expected


def test_prefix_hits_match_transformers(world):
    folder, prompts, expected = world
    sink, observer = Sink(), Preemptions()
    scheduler = Scheduler(load(folder, num_kv_blocks=256), sink, observer=observer)
    for turn in range(2):
        for index, prompt in enumerate(prompts):
            submit(scheduler, f"t{turn}r{index}", prompt)
            run_to_idle(scheduler)
    assert observer.cached >= sum(len(prompt) for prompt in prompts) // 2
    for turn in range(2):
        assert [sink.tokens[f"t{turn}r{index}"] for index in range(len(prompts))] == expected


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_preempted_and_resumed_requests_match_transformers(world, prefix_cache):
    folder, prompts, expected = world
    sink, observer = Sink(), Preemptions()
    scheduler = Scheduler(
        # The longest alone needs 14 blocks of 4 tokens, so two can start and only one can finish.
        load(folder, num_kv_blocks=18),
        sink,
        observer=observer,
        max_prefill_tokens=8,
        prefix_cache=prefix_cache,
    )
    for index, prompt in enumerate(prompts):
        submit(scheduler, f"r{index}", prompt)
    run_to_idle(scheduler)
    assert observer.preempted >= 2
    assert [sink.tokens[f"r{index}"] for index in range(len(prompts))] == expected


def test_survivors_of_a_sweep_match_transformers(world):
    folder, prompts, expected = world
    sink = Sink()
    scheduler = Scheduler(load(folder, num_kv_blocks=64), sink, max_batch=6, max_prefill_tokens=7)
    for index, prompt in enumerate(prompts):
        submit(scheduler, f"r{index}", prompt)
        submit(scheduler, f"gone{index}", list(reversed(prompt)))
    for index in range(len(prompts)):
        scheduler.iterate()
        scheduler.cancel(f"gone{index}")
    run_to_idle(scheduler)
    assert [sink.tokens[f"r{index}"] for index in range(len(prompts))] == expected
    assert {sink.finishes[f"gone{index}"].reason for index in range(len(prompts))} == {"abort"}


def test_the_same_seed_gives_the_same_tokens_whatever_else_is_in_the_batch(world):
    folder, prompts, _ = world
    sampling = Sampling(temperature=0.9, top_k=40, top_p=0.95, seed=1234)
    outputs = []
    for strangers in (0, 7):
        sink = Sink()
        scheduler = Scheduler(load(folder, num_kv_blocks=256), sink, max_prefill_tokens=9)
        for index in range(strangers):
            submit(scheduler, f"s{index}", prompts[index])
        scheduler.submit(Request("seeded", prompts[3], sampling=sampling, max_tokens=NEW_TOKENS))
        run_to_idle(scheduler)
        outputs.append(sink.tokens["seeded"])
    assert outputs[0] == outputs[1]
