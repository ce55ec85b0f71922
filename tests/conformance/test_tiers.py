"""Tiers change no token and no byte: the real scheduler over real memory, with copies in the way.

The copy thread is held at a gate that opens when a step needs it, or when chance says so; steps,
cancels and evictions overlap whatever is being copied then.
"""

from __future__ import annotations

import random
from collections import Counter

import numpy
import pytest
import torch

from qwen3_asgi.model import memory, tiers
from qwen3_asgi.scheduler.loop import Scheduler
from qwen3_asgi.scheduler.plan import Sampling
from qwen3_asgi.scheduler.request import Request, State
from qwen3_asgi.testing.fake_executor import FakeExecutor, generate
from tests.model.checkpoints import VOCAB, load, write_checkpoint
from tests.model.tier_world import BLOCK_SIZE, DEVICES, GatedTiers, World

GREEDY = Sampling(temperature=0.0)


class Sink:
    def __init__(self):
        self.tokens = {}
        self.finishes = {}
        self.on_finish = lambda: None

    def deliver(self, events):
        for event in events:
            if event.token is not None:
                self.tokens.setdefault(event.request_id, []).append(event.token.token_id)
            if event.finish is not None:
                assert event.request_id not in self.finishes
                self.finishes[event.request_id] = event.finish
                self.on_finish()


class Life:
    """One scheduler, and somebody who comes, leaves, copies and steps at random."""

    def __init__(self, executor, tiers, prompts, seed, *, overlap=False, **settings):
        self.overlap = overlap
        self.random = random.Random(seed)
        self.tiers, self.prompts = tiers, prompts
        self.sink = Sink()
        self.asked = {}
        self.loads_cancelled = 0
        self.scheduler = Scheduler(executor, self.sink, overlap=overlap, **settings)
        # Or the last turn would park for good: cancelling nobody wakes it.
        self.sink.on_finish = lambda: self.scheduler.cancel("nobody")

    def run(self, operations):
        choose = self.random
        for number in range(operations):
            match choose.choices(range(5), weights=[4, 1.5, 3, 9, 0.3])[0]:
                case 0:
                    self.submit(f"r{number}")
                case 1:
                    self.cancel()
                case 2 if self.tiers is not None:
                    self.tiers.gate.let(choose.randrange(1, 4))
                case 3 if self.overlap and choose.random() < 0.5:
                    self.land()
                case 3:
                    self.iterate()
                case 4 if self.tiers is not None:
                    self.tiers.gate.set_open(choose.random() < 0.3)
        while set(self.sink.finishes) != set(self.asked):
            self.land()

    def land(self):
        """Wait for whatever runs, if nothing can be begun before."""
        if self.tiers is not None:
            self.tiers.gate.set_open(True)
        if len(self.sink.finishes) < len(self.asked):
            self.iterate(park=True)
        if self.tiers is not None:
            self.tiers.gate.set_open(False)

    def submit(self, name):
        which = self.random.randrange(len(self.prompts))
        count = self.random.randrange(1, 6)
        self.asked[name] = which, count
        prompt = list(self.prompts[which])
        self.scheduler.submit(Request(name, prompt, sampling=GREEDY, max_tokens=count))

    def cancel(self):
        states = list(State) if self.random.random() < 0.5 else [State.LOADING]
        live = [name for state in states for name in self.scheduler.live_requests(state)]
        if live:
            name = self.random.choice(live)
            self.loads_cancelled += name in self.scheduler.live_requests(State.LOADING)
            self.scheduler.cancel(name)

    def iterate(self, *, park=False):
        self.scheduler.iterate(park=park)
        self.scheduler.check_integrity()

    def check(self, expected):
        """`expected(which)` says what a prompt's continuation is."""
        assert set(self.sink.finishes) == set(self.asked)
        for name, (which, count) in self.asked.items():
            end = self.sink.finishes[name]
            tokens = self.sink.tokens.get(name, [])
            assert end.reason in ("length", "abort"), end.error
            assert end.reason == "abort" or len(tokens) == count
            assert tokens == expected(which)[: len(tokens)]


def prompts_of(seed, count, vocab, lengths):
    """Prompts some of which begin like others."""
    source = random.Random(seed)
    found = []
    for _ in range(count):
        head = source.choice(found)[: source.randrange(1, 12)] if found else []
        found.append(head + source.choices(range(1, vocab), k=source.choice(lengths)))
    return found


# ---- a real model ----


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("tied"), "tied")


@pytest.fixture(scope="module")
def prompts():
    return prompts_of(5, 10, VOCAB, [9, 14, 27])


@pytest.fixture(scope="module")
def undisturbed(folder, prompts):
    """Each prompt alone, in a pool that never fills up, without tiers."""
    found = []
    for prompt in prompts:
        sink = Sink()
        scheduler = Scheduler(load(folder), sink)
        scheduler.submit(Request("r", list(prompt), sampling=GREEDY, max_tokens=6))
        while not scheduler.load.idle or not sink.finishes:
            scheduler.iterate()
        found.append(sink.tokens["r"])
    return found


def gib(blocks, file=False):
    block = 2 * 3 * 2 * 16 * 4 * 4 + (128 if file else 0)
    return ((blocks + 0.5) * block + (8192 if file else 0)) / memory.GIB


@pytest.mark.parametrize("overlap", [False, True], ids=["steps alone", "overlapping steps"])
@pytest.mark.parametrize("levels", ["none", "host", "file", "both"])
@pytest.mark.parametrize("device", DEVICES)
def test_outputs_are_those_of_an_undisturbed_run(
    folder, prompts, undisturbed, tmp_path, monkeypatch, device, levels, overlap
):
    if device == "cuda" and levels == "file":
        pytest.skip("on CUDA the file needs host memory in front")
    monkeypatch.setattr(tiers, "TorchTiers", GatedTiers)
    monkeypatch.setattr(tiers, "PIECE_BLOCKS", 2)
    settings = {"num_kv_blocks": 18, "device": device, "dtype": "float32"}
    if levels in ("host", "both"):
        settings["host_kv_gib"] = gib(20)
    if levels in ("file", "both"):
        settings |= {"kv_file": str(tmp_path / "kv"), "kv_file_gib": gib(30, file=True)}
    executor = load(folder, **settings)
    life = Life(
        executor,
        executor.tiers,
        prompts,
        seed=1,
        max_batch=3,
        max_prefill_tokens=10,
        overlap=overlap,
    )
    life.run(900)
    life.check(lambda which: undisturbed[which])
    assert {end.reason for end in life.sink.finishes.values()} == {"length", "abort"}
    if levels != "none":
        moved = Counter(target for _, target, _ in executor.tiers.copied)
        assert moved["device"] > 20, "prefixes must come back for this to mean anything"
        assert life.loads_cancelled > 0
    life.scheduler.stop()
    life.scheduler.run()
    executor.close()


def test_what_a_file_restores_after_a_restart_gives_the_same_tokens(
    folder, prompts, undisturbed, tmp_path
):
    cached = []
    for _ in range(2):
        executor = load(
            folder, num_kv_blocks=18, kv_file=str(tmp_path / "kv"), kv_file_gib=gib(200, file=True)
        )
        sink = Sink()
        scheduler = Scheduler(executor, sink)
        copied = []
        for which, prompt in enumerate(prompts):
            scheduler.submit(Request(f"r{which}", list(prompt), sampling=GREEDY, max_tokens=6))
            while f"r{which}" not in sink.finishes:
                scheduler.iterate(park=True)
            copied.append(sink.finishes[f"r{which}"].cached_tokens)
        assert [sink.tokens[f"r{which}"] for which in range(len(prompts))] == undisturbed
        cached.append(copied)
        executor.close()
    assert sum(cached[1]) > sum(cached[0]), "the second life begins with what the first has left"
    assert cached[0][0] == 0 < cached[1][0]


# ---- bytes ----


class PoolSlots:
    """What `FakeExecutor` knows of each KV slot, kept as bytes in the pool and nowhere else.

    A sequence is a number; a slot holds a fixed random pattern with that number in every value.
    Reading compares all of it, so a block that is mixed up by one byte is seen.
    """

    def __init__(self, pool):
        source = numpy.random.default_rng(0)
        self._caches = [cache.numpy() for layer in pool.layers for cache in layer]
        self._patterns = [
            source.integers(-(2**62), 2**62, (cache.shape[0], cache.shape[2]))
            for cache in self._caches
        ]
        self._numbers = {}
        self._prefixes = []

    def __setitem__(self, slot, prefix):
        number = self._numbers.setdefault(prefix, len(self._prefixes))
        if number == len(self._prefixes):
            self._prefixes.append(prefix)
        for cache, pattern in zip(self._caches, self._patterns, strict=True):
            cache[:, slot] = pattern ^ number

    def __getitem__(self, slot):
        number = int(self._caches[0][0, slot, 0] ^ self._patterns[0][0, 0])
        for cache, pattern in zip(self._caches, self._patterns, strict=True):
            if not (cache[:, slot] == pattern ^ number).all():
                raise AssertionError(f"slot {slot} holds bytes of more than one sequence")
        return self._prefixes[number]


OPERATIONS = 1000
VOCABULARY = 1000


def byte_life(seed, path):
    choose = random.Random(seed)
    levels = choose.choice(["host", "both", "both", "file"])
    blocks = choose.choice([10, 14])
    world = World(
        blocks=blocks,
        host_slots=0 if levels == "file" else choose.choice([6, 12, 40]),
        path=None if levels == "host" else path,
        file_slots=20,
        dtype=torch.int64,
    )
    with world:
        executor = FakeExecutor(
            num_kv_blocks=blocks, block_size=BLOCK_SIZE, vocab_size=VOCABULARY, tiers=world.tiers
        )
        executor._slots = PoolSlots(world.pool)
        prompts = prompts_of(seed, 12, VOCABULARY, [9, 13, 21])
        life = Life(
            executor,
            world.tiers,
            [prompt[: 4 * blocks - 8] for prompt in prompts],
            seed,
            max_batch=3,
            max_prefill_tokens=choose.choice([5, 512]),
            overlap=choose.random() < 0.3,
        )
        life.run(OPERATIONS)
        life.check(lambda which: generate(life.prompts[which], 6, VOCABULARY))
        life.scheduler.stop()
        life.scheduler.run()
        copied = Counter((source, target) for source, target, _ in world.tiers.copied)
        return copied, life.loads_cancelled


@pytest.mark.slow
def test_ten_thousand_operations_keep_every_byte(tmp_path, monkeypatch):
    """Everything a row stands on is compared with what was once written there, byte for byte."""
    monkeypatch.setattr(tiers, "PIECE_BLOCKS", 2)
    copied, loads_cancelled = Counter(), 0
    for seed in range(10_000 // OPERATIONS):
        more, cancelled = byte_life(seed, tmp_path / f"{seed}")
        copied += more
        loads_cancelled += cancelled
    ways = [("device", "host"), ("device", "file"), ("host", "file")]
    ways += [("host", "device"), ("file", "device")]
    assert all(copied[way] > 50 for way in ways), copied
    assert loads_cancelled > 20
