"""Whole engines over a fake executor: real thread, scheduler and bridge, no torch or weights.

`fake_engine` builds one; `use_fake_models` puts the fake model into the engines of a host's app.
"""

from __future__ import annotations

import json
from contextlib import contextmanager
from typing import TYPE_CHECKING
from zlib import crc32

from qwen3_asgi.engine.engine import Engine
from qwen3_asgi.engine.loading import LoadedModel, ReadAdapter, SamplingDefaults
from qwen3_asgi.engine.process import engines, replace_loading
from qwen3_asgi.testing.fake_executor import FakeExecutor
from qwen3_asgi.testing.gate import StepGate
from qwen3_asgi.testing.replies import ScriptedReplies
from qwen3_asgi.text.tokenizer import Tokenizer
from qwen3_asgi.tiny import tiny_path

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from qwen3_asgi.config import EngineConfig
    from qwen3_asgi.engine.loading import ReadFile
    from qwen3_asgi.scheduler.executor import ModelExecutor
    from qwen3_asgi.testing.fake_executor import Reply
    from qwen3_asgi.testing.replies import Replies


def fake_engine(
    executor: ModelExecutor | None = None,
    config: EngineConfig | None = None,
    *,
    eos_token_ids: tuple[int, ...] | None = None,
    tokenizer: Tokenizer | None = None,
    replies: Replies | None = None,
    gate: StepGate | None = None,
) -> Engine:
    """An engine named "fake". What it says is deterministic nonsense, or what `replies` has.

    Args:
        executor: a `FakeExecutor` with room for most tests when None.
        config: as for `Engine`.
        eos_token_ids: the tokens that end an output. When None: 0, which `FakeExecutor.eos_after`
            yields; the tokenizer's end of turn with `replies`.
        tokenizer: the bundled model's when None.
        replies: what to say: a map from the last user message (or the whole prompt) to the reply,
            or a function from the whole prompt, as the model sees it, to the reply. A prompt
            without a reply fails with `GenerationFailed`, and so does one whose function raises.
        gate: holds the steps.

    Raises:
        ValueError: `replies` or `gate` with an `executor`: give them to the executor.
    """
    if executor is not None and (replies is not None or gate is not None):
        raise ValueError("replies and gate belong to the executor; don't give one")

    def load(name: str, settings: EngineConfig) -> LoadedModel:
        del name, settings
        text = tokenizer or bundled_tokenizer()
        if executor is None:
            script = None if replies is None else ScriptedReplies(replies, text)
            model: ModelExecutor = _fake_executor(text, script, gate)
        else:
            model = executor
        ends = eos_token_ids
        if ends is None:
            ends = (0,) if replies is None else (end_of_turn(text),)
        return LoadedModel(model, text, ends, SamplingDefaults(temperature=0.0), fake_adapter)

    return Engine("fake", config, loader=load)


class FakeModels:
    """What `use_fake_models` yields. `engines` are those that were started inside, `executors`
    what they run on, in the same order; `gate` holds their steps.

    `replies` may be set at any time; None is deterministic nonsense that never ends by itself.
    """

    def __init__(self, replies: Replies | None, gate: StepGate) -> None:
        self.replies = replies
        self.gate = gate
        self.engines: list[Engine] = []
        self.executors: list[FakeExecutor] = []
        self._tokenizer = bundled_tokenizer()

    def load(self, engine: Engine) -> LoadedModel:
        """The model of an engine that starts; called on its scheduler thread."""
        executor = _fake_executor(self._tokenizer, self._reply, self.gate)
        self.engines.append(engine)
        self.executors.append(executor)
        defaults = SamplingDefaults(temperature=0.0)
        return LoadedModel(executor, self._tokenizer, (executor.eos,), defaults, fake_adapter)

    def _reply(self, prompt_token_ids: Sequence[int]) -> Sequence[int] | None:
        if self.replies is None:
            return None
        return ScriptedReplies(self.replies, self._tokenizer)(prompt_token_ids)


@contextmanager
def use_fake_models(
    replies: Replies | None = None, *, gate: StepGate | None = None
) -> Iterator[FakeModels]:
    """Every engine that starts inside loads a fake model instead of weights, whoever built it and
    whenever: an app's own `engine = Engine("Qwen/Qwen3-4B")` needs no change for its tests.

    On leaving, the gate is opened and these engines are stopped; they are as new afterwards, so the
    next test (or the app itself) can start them again. Engines that run already, and those with a
    `loader` of their own, are left alone. Arguments as for `fake_engine`.
    """
    models = FakeModels(replies, gate or StepGate())
    running = [engine for engine in engines() if engine.state == "starting"]
    before = replace_loading(models.load)
    try:
        yield models
    finally:
        models.gate.open()
        # Those that have just begun to start, too: they would find the real loader in its place.
        late = [e for e in engines() if e.state == "starting" and e not in running]
        for engine in {*models.engines, *late}:
            engine.stop_sync(drain=0)
            engine.renew()
        replace_loading(before)


def fake_adapter(read: ReadFile) -> ReadAdapter:
    """A fake model takes any folder with PEFT's `adapter_config.json` as an adapter, and says other
    nonsense with one that has other things in it."""
    settings = read("adapter_config.json", 1 << 20)
    seed = 1 + crc32(settings)
    return ReadAdapter(seed, json.loads(settings)["r"], f"fake {seed}")


def bundled_tokenizer() -> Tokenizer:
    """The tokenizer of the model "tiny"; it speaks Qwen3's chat template."""
    return Tokenizer.from_folder(tiny_path())


def end_of_turn(tokenizer: Tokenizer) -> int:
    """The token that ends a reply."""
    return tokenizer.token_id("<|im_end|>") or 0


def _fake_executor(
    tokenizer: Tokenizer, reply: Reply | None, gate: StepGate | None
) -> FakeExecutor:
    return FakeExecutor(
        num_kv_blocks=1024,
        block_size=16,
        vocab_size=len(tokenizer.owned_token_ids),
        gate=gate,
        reply=reply,
        eos=0 if reply is None else end_of_turn(tokenizer),
    )
