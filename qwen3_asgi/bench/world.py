"""A scheduler on a random model with a long context, and clients that note when tokens come.

No tokenizer, no server: what is timed is the scheduler and the forward passes, as they reach the
scheduler's sink.
"""

from __future__ import annotations

import gc
import json
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from qwen3_asgi.config import EngineConfig
from qwen3_asgi.scheduler.loop import Scheduler
from qwen3_asgi.scheduler.plan import Sampling
from qwen3_asgi.scheduler.request import Request
from qwen3_asgi.scheduler.trace import SchedulerTrace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from qwen3_asgi.scheduler.events import Event
    from qwen3_asgi.scheduler.executor import ModelExecutor

VOCAB, HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 320, 64, 128, 2, 4, 2, 32
CONTEXT_TOKENS = 32_768
KV_BLOCKS = 8192
GUARD_SECONDS = 300.0


class Clients:
    """The sink: when each request's tokens came, and who has ended. Waited for on any thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.times: dict[str, list[float]] = {}
        self.ended: dict[str, str] = {}

    def deliver(self, events: Sequence[Event]) -> None:
        now = time.monotonic()
        with self._changed:
            for event in events:
                if event.token is not None:
                    self.times.setdefault(event.request_id, []).append(now)
                if event.finish is not None:
                    self.ended[event.request_id] = event.finish.reason
            self._changed.notify_all()

    def wait(self, done: Callable[[Clients], bool]) -> None:
        """
        Raises:
            TimeoutError: it did not come about.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: done(self), GUARD_SECONDS):
                raise TimeoutError("the benchmark's requests got stuck")

    def count(self, name: str) -> int:
        return len(self.times.get(name, ()))

    def wait_tokens(self, names: Sequence[str], more: int) -> None:
        """Until each of them has got so many more."""
        with self._changed:
            wanted = {name: self.count(name) + more for name in names}
        self.wait(lambda clients: all(clients.count(name) >= wanted[name] for name in names))

    def wait_end(self, *names: str) -> None:
        self.wait(lambda clients: all(name in clients.ended for name in names))


class World:
    """The running scheduler; `clients` and `trace` show what it did."""

    def __init__(self, scheduler: Scheduler, clients: Clients, trace: SchedulerTrace) -> None:
        self.scheduler = scheduler
        self.clients = clients
        self.trace = trace

    def submit(self, name: str, prompt_tokens: int, max_tokens: int | None = None) -> None:
        """A request whose prompt no other shares."""
        first = sum(name.encode()) % VOCAB
        prompt = [(first + i * i) % VOCAB for i in range(prompt_tokens)]
        self.trace.mark("submit", name)
        request = Request(
            name,
            prompt,
            sampling=Sampling(temperature=0.0),
            max_tokens=max_tokens,
            arrival=time.monotonic(),
        )
        self.scheduler.submit(request)

    def hang_up(self, name: str) -> None:
        self.trace.mark("disconnect", name)
        self.scheduler.cancel(name)


@contextmanager
def frozen() -> Iterator[None]:
    """What lives already is not looked at by collections inside; with torch that takes as long as
    many steps, and stops every thread meanwhile."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def running(
    executor: ModelExecutor, *, overlap: bool, chunk_tokens: int, max_batch: int
) -> Iterator[World]:
    """A scheduler in a thread of its own, stopped at the end; the executor goes on living."""
    clients, trace = Clients(), SchedulerTrace(100_000)
    scheduler = Scheduler(
        executor,
        clients,
        max_batch=max_batch,
        max_prefill_tokens=chunk_tokens,
        prefix_cache=False,
        overlap=overlap,
        observer=trace,
        trace=trace.phase,
    )
    thread = threading.Thread(target=scheduler.run, name="qwen3-asgi bench", daemon=True)
    thread.start()
    try:
        with frozen():
            yield World(scheduler, clients, trace)
    finally:
        scheduler.stop()
        thread.join()


@contextmanager
def long_model(
    *, context_tokens: int = CONTEXT_TOKENS, num_kv_blocks: int = KV_BLOCKS, device: str = "cpu"
) -> Iterator[ModelExecutor]:
    """The real executor over a small random checkpoint, written for it."""
    from qwen3_asgi.model.executor import load_executor

    with TemporaryDirectory() as folder:
        write_checkpoint(Path(folder), context_tokens)
        config = EngineConfig(device=device, dtype="float32", num_kv_blocks=num_kv_blocks)
        executor = load_executor(Path(folder), config, owned_token_ids=VOCAB)
        try:
            yield executor
        finally:
            executor.close()


def write_checkpoint(folder: Path, context_tokens: int) -> None:
    """A Qwen3 with random weights: the same every time."""
    import numpy
    from safetensors.numpy import save_file

    random = numpy.random.default_rng(0)
    weights: dict[str, numpy.ndarray] = {}

    def add(name: str, *shape: int) -> None:
        spread = random.standard_normal(shape, dtype="float32") / shape[-1] ** 0.5
        weights[f"model.{name}.weight"] = spread if len(shape) > 1 else numpy.ones(shape, "float32")

    add("embed_tokens", VOCAB, HIDDEN)
    add("norm", HIDDEN)
    for layer in range(LAYERS):
        at = f"layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            add(f"{at}.{norm}", HIDDEN)
        for name, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            add(f"{at}.self_attn.{name}_proj", heads * HEAD_DIM, HIDDEN)
        add(f"{at}.self_attn.o_proj", HIDDEN, HEADS * HEAD_DIM)
        for name in ("q", "k"):
            add(f"{at}.self_attn.{name}_norm", HEAD_DIM)
        for name in ("gate", "up"):
            add(f"{at}.mlp.{name}_proj", INTERMEDIATE, HIDDEN)
        add(f"{at}.mlp.down_proj", HIDDEN, INTERMEDIATE)
    save_file(weights, str(folder / "model.safetensors"))
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": context_tokens,
        "rope_theta": 1_000_000.0,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "torch_dtype": "float32",
        "eos_token_id": 0,
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
