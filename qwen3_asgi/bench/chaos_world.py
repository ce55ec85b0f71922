"""What chaos is made of: jobs with known answers, an executor that fails, a ledger of all ends.

Also the host app through which half of the clients come, and the engine behind it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from qwen3_asgi.config import EngineConfig, SamplingParams
from qwen3_asgi.engine.engine import Engine
from qwen3_asgi.engine.loading import load_model
from qwen3_asgi.errors import GenerationFailed
from qwen3_asgi.scheduler.plan import result_of

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from qwen3_asgi.engine.loading import LoadedModel
    from qwen3_asgi.engine.mailbox import Mailbox
    from qwen3_asgi.engine.output import GenerationOutput
    from qwen3_asgi.scheduler.events import Event
    from qwen3_asgi.scheduler.executor import ModelExecutor
    from qwen3_asgi.scheduler.plan import RunningStep, StepPlan, StepResult

BLOCK_SIZE = 16
# Far less than a full batch of the longest prompts needs, so that some are preempted.
NUM_KV_BLOCKS = 48
MAX_BATCH = 16
HOST_KV_GIB = 0.005
LONGEST_PROMPT = 200
LENGTHS = (4, 16, 64)
ADAPTERS = ("east", "west")
INJECTED = "injected by the chaos"
FAKE_STEP_SECONDS = 0.001
FAKE_VOCAB = 512
# A token that wins by less than this over the next one may lose when it is computed in another
# batch, in another order: such a prompt proves nothing.
LEAST_MARGIN = 0.02


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """One request, and what an undisturbed engine answers to it (each of its `n` outputs)."""

    prompt: tuple[int, ...]
    max_tokens: int
    adapter: str | None
    token_ids: tuple[int, ...]
    text: str
    n: int = 1
    timeout: float | None = None
    priority: int = 0

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(
            max_tokens=self.max_tokens, temperature=0.0, ignore_eos=True, n=self.n
        )

    @property
    def asked(self) -> dict[str, Any]:
        """The arguments of `Engine.submit`."""
        return {
            "prompt_token_ids": self.prompt,
            "params": self.params,
            "adapter": self.adapter,
            "timeout": self.timeout,
            "priority": self.priority,
        }


class Jobs:
    """Every job there can be. Prompts begin alike, so that they share a prefix.

    Args:
        engine: answers each of them, and nothing disturbs it meanwhile.
    """

    def __init__(self, engine: Engine, rng: random.Random, num_prompts: int) -> None:
        self._plain: list[Job] = []
        vocab = len(engine.tokenizer.owned_token_ids)
        stem = [rng.randrange(vocab) for _ in range(LONGEST_PROMPT)]
        missing = num_prompts
        while missing:
            prompts = []
            for _ in range(missing):
                length = rng.randrange(5, LONGEST_PROMPT)
                shared = rng.choice((0, length // 2, length - 1))
                prompts.append(
                    stem[:shared] + [rng.randrange(vocab) for _ in range(length - shared)]
                )
            found = [jobs for jobs in _undisturbed(engine, prompts) if jobs]
            self._plain += [job for jobs in found for job in jobs]
            missing -= len(found)

    def draw(self, rng: random.Random) -> Job:
        job = rng.choice(self._plain)
        # There is always somebody at 0: without a deadline the least urgent would wait for ever.
        priority = rng.choice((-1, 0, 0, 0, 1))
        hurries = priority > 0 or rng.random() < 0.1
        return dataclasses.replace(
            job,
            n=rng.choice((1, 1, 1, 1, 2, 3)),
            timeout=rng.uniform(0.02, 1.0) if hurries else None,
            priority=priority,
        )

    def warm(self, engine: Engine) -> None:
        """Ask everything once, so that what grows later is no memory of it. Some may fail."""
        for job in self._plain:
            with contextlib.suppress(GenerationFailed):
                engine.generate_sync(**job.asked)


def _undisturbed(engine: Engine, prompts: list[list[int]]) -> list[list[Job]]:
    """Each prompt's jobs; none if a token is not clear enough."""
    wanted = [
        (prompt, adapter, length)
        for prompt in range(len(prompts))
        for adapter in (None, *ADAPTERS)
        for length in LENGTHS
    ]

    def answer(what: tuple[int, str | None, int]) -> GenerationOutput:
        prompt, adapter, length = what
        params = SamplingParams(max_tokens=length, temperature=0.0, ignore_eos=True, logprobs=2)
        return engine.generate_sync(
            prompt_token_ids=prompts[prompt], params=params, adapter=adapter
        )

    found: list[list[Job]] = [[] for _ in prompts]
    unclear: set[int] = set()
    with ThreadPoolExecutor(MAX_BATCH) as pool:
        for (prompt, adapter, length), output in zip(wanted, pool.map(answer, wanted), strict=True):
            for token in output.logprobs or ():
                values = [value for _, value in token.top_logprobs]
                if len(values) > 1 and values[0] - values[1] < LEAST_MARGIN:
                    unclear.add(prompt)
            job = Job(tuple(prompts[prompt]), length, adapter, output.token_ids, output.text)
            found[prompt].append(job)
    return [[] if prompt in unclear else jobs for prompt, jobs in enumerate(found)]


class Injected(Exception):
    """What an executor raises on purpose."""


class FaultyExecutor:
    """Passes everything on, but each `fail_every`-th step fails: in turns before it has written
    anything, and when all is done."""

    def __init__(
        self, executor: ModelExecutor, fail_every: int, trim: Callable[[], None] | None = None
    ) -> None:
        self.steps = self.failures = 0
        self._executor = executor
        self._fail_every = fail_every
        self._trim = trim
        self._lock = threading.Lock()  # with overlap there are two steps at a time

    def step(self, plan: StepPlan) -> StepResult | RunningStep:
        with self._lock:
            self.steps += 1
            fails = self.steps % self._fail_every == 0
            self.failures += fails
            late = self.failures % 2 == 0
        if self._trim is not None:
            self._trim()
        if fails and not late:
            raise Injected(INJECTED)
        result = self._executor.step(plan)
        if fails:
            result_of(result)  # nothing may still write to blocks that are given back
            raise Injected(INJECTED)
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)


class Ledger:
    """Counts the terminal events of every request, in front of the delivery of a started engine."""

    def __init__(self, engine: Engine) -> None:
        self.live: set[str] = set()
        self.submitted = 0
        self.ends: Counter[str] = Counter()
        self.wrong: list[str] = []
        runtime = engine._lifecycle.runtime
        if runtime is None:
            raise ValueError("the engine must have been started")
        delivery = runtime.delivery
        self._register, self._deliver = delivery.register, delivery.deliver
        delivery.register = self._on_register  # type: ignore[method-assign]
        delivery.deliver = self._on_deliver  # type: ignore[method-assign]

    def _on_register(
        self, *mailboxes: Mailbox, check: Callable[[int, int], None] | None = None
    ) -> None:
        # Before it is handed on: its end may come at once.
        self.live.update(mailbox.request_id for mailbox in mailboxes)
        self.submitted += len(mailboxes)
        try:
            self._register(*mailboxes, check=check)
        except BaseException:
            self.live.difference_update(mailbox.request_id for mailbox in mailboxes)
            self.submitted -= len(mailboxes)
            raise

    def _on_deliver(self, events: Sequence[Event]) -> None:
        for event in events:
            if event.request_id not in self.live:
                self.wrong.append(f"an event of {event.request_id} after its end")
            if event.finish is not None:
                self.live.discard(event.request_id)
                self.ends[event.finish.reason] += 1
        self._deliver(events)


class World:
    """An engine for the chaos, or a calm one that says what is right. Its construction starts it
    not."""

    def __init__(
        self,
        model: str,
        adapter_folder: Path,
        *,
        fail_every: int = 0,
        overlap: bool = False,
        pipelined: bool = False,
    ) -> None:
        self.executor: FaultyExecutor | None = None
        self.adapter_paths = {name: adapter_folder / name for name in ADAPTERS}
        self._fail_every = fail_every
        for number, path in enumerate(self.adapter_paths.values()):
            write_adapter(path, model, number)
        calm = not fail_every
        config = EngineConfig(
            device="cpu",
            dtype="float32",
            block_size=BLOCK_SIZE,
            num_kv_blocks=4096 if calm else NUM_KV_BLOCKS,
            max_prefill_tokens=64,
            max_batch=MAX_BATCH,
            overlap=overlap,
            pipelined=pipelined,
            host_kv_gib=0.0 if calm or model == "fake" else HOST_KV_GIB,
            max_failures=3,  # one failure never follows another
        )
        self.engine = Engine(model, config, loader=self._load)

    def _load(self, name: str, config: EngineConfig) -> LoadedModel:
        if name == "fake":
            model, trim = _fake_model(config)
        else:
            model, trim = load_model(name, config), None
        if not self._fail_every:
            return model
        self.executor = FaultyExecutor(model.executor, self._fail_every, trim)
        return dataclasses.replace(model, executor=self.executor)

    def load_adapters(self) -> None:
        for name, path in self.adapter_paths.items():
            self.engine.load_adapter_sync(name, path)


def _fake_model(config: EngineConfig) -> tuple[LoadedModel, Callable[[], None]]:
    from qwen3_asgi.engine.loading import LoadedModel, SamplingDefaults
    from qwen3_asgi.testing import FakeExecutor
    from qwen3_asgi.testing.engine import bundled_tokenizer, fake_adapter
    from qwen3_asgi.testing.fake_tiers import FakeTiers

    tiers = FakeTiers(host_slots=64, file_slots=64)
    executor = FakeExecutor(
        num_kv_blocks=config.num_kv_blocks or NUM_KV_BLOCKS,
        block_size=BLOCK_SIZE,
        vocab_size=FAKE_VOCAB,
        tiers=tiers,
    )
    executor.before_step = lambda plan: time.sleep(FAKE_STEP_SECONDS)

    def trim() -> None:
        """The fake records everything for its tests; here that would look like a leak."""
        for record in (executor.rows, executor.dropped, executor.copied_blocks, tiers.copied):
            record.clear()

    model = LoadedModel(
        executor, bundled_tokenizer(), (), SamplingDefaults(temperature=0.0), fake_adapter
    )
    return model, trim


def write_adapter(folder: Path, model: str, number: int) -> None:
    """A random LoRA adapter of the model (of the fake one: a number)."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "peft_type": "LORA"}
    text = json.dumps({**settings, "base_model_name_or_path": f"{model} {number}"})
    (folder / "adapter_config.json").write_text(text)
    if model == "fake":
        return
    import numpy
    from safetensors.numpy import save_file

    from qwen3_asgi.tiny import tiny_path

    shape = json.loads((tiny_path() / "config.json").read_text())
    hidden, out = shape["hidden_size"], shape["num_attention_heads"] * shape["head_dim"]
    dice = numpy.random.default_rng(number)
    weights = {}
    for layer in range(shape["num_hidden_layers"]):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora"
        weights[f"{name}_A.weight"] = dice.normal(0, 0.1, (4, hidden)).astype("float32")
        weights[f"{name}_B.weight"] = dice.normal(0, 0.1, (out, 4)).astype("float32")
    save_file(weights, folder / "adapter_model.safetensors")
