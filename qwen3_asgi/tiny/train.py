"""Trains the bundled model from nothing: `python -m qwen3_asgi.tiny.train --out DIR`.

Tokenizer, configuration, weights and `training.json` go into DIR; the text is generated on the way.
A run that was stopped goes on from DIR/state.pt. The optimizer Muon needs torch 2.9.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from dataclasses import asdict, dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import tokenizers
import torch
import transformers
from safetensors.torch import save
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from .batches import IGNORED, Batch, batches
from .corpus import samples
from .evaluate import score
from .heldout import heldout_items
from .rendering import Rendering
from .shape import OWNED_TOKENS, model_config, save_configs
from .tokenizer import MARKUP, SPECIAL, save_tokenizer, train_tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PreTrainedTokenizerBase

    from .sample import Sample

_TOKENIZER_SAMPLES = 20_000
_SAVE_EVERY_STEPS = 250
_REPORT_EVERY_STEPS = 50
_STATE = "state.pt"


RATES = ((0, 0.0), (100, 1.0), (2000, 1.0), (2750, 0.423), (3250, 0.188), (3850, 0.0))
"""Step and share of the learning rate; straight lines in between."""


class Settings(NamedTuple):
    seed: int
    steps: int
    batch_tokens: int
    learning_rate: float
    weight_decay: float = 0.05


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _pieces(seed: int, rendering: Rendering) -> Iterator[str]:
    """Rendered samples, cut at the markup that the tokenizer must not learn to merge."""
    markup = re.compile("|".join(map(re.escape, (*SPECIAL, *MARKUP))))
    for sample in islice(samples(seed), _TOKENIZER_SAMPLES):
        yield from markup.split(rendering.text(sample))


def make_tokenizer(folder: Path, seed: int) -> PreTrainedTokenizerBase:
    """A tokenizer without merges renders the text that the real one is trained on."""
    save_tokenizer(train_tokenizer([], 256 + len(SPECIAL) + len(MARKUP)), folder)
    rendering = Rendering(AutoTokenizer.from_pretrained(folder))
    save_tokenizer(train_tokenizer(_pieces(seed, rendering), OWNED_TOKENS), folder)
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder)
    return tokenizer


def _rate(settings: Settings, step: int) -> float:
    """A run of another length stretches the schedule."""
    place = (step + 1) * RATES[-1][0] / settings.steps
    for (start, low), (end, high) in pairwise(RATES):
        if place < end:
            return settings.learning_rate * (low + (high - low) * (place - start) / (end - start))
    return 0.0


def _optimizers(model: Any, settings: Settings) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, AdamW for the embedding and the norms."""
    layers = [p for p in model.model.layers.parameters() if p.ndim == 2]
    inside = {id(p) for p in layers}
    others = [p for p in model.parameters() if id(p) not in inside]
    rate, decay = settings.learning_rate, settings.weight_decay
    return [
        torch.optim.Muon(layers, lr=rate, weight_decay=decay, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=rate, weight_decay=0.0, betas=(0.9, 0.97), fused=True),
    ]


def _loss(model: Any, batch: Batch) -> torch.Tensor:
    """Logits are computed for the targets alone: a third of the places."""
    with torch.autocast("cpu", torch.bfloat16):
        hidden = model.model(input_ids=batch.ids, use_cache=False).last_hidden_state
        logits = model.lm_head(hidden.flatten(0, 1)[batch.places])
    return torch.nn.functional.cross_entropy(logits.float(), batch.targets, ignore_index=IGNORED)


def save_weights(model: Any, folder: Path) -> None:
    """The tied head isn't written twice."""
    state = {
        name: tensor.detach().to(torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"
    }
    (folder / "model.safetensors").write_bytes(save(state, metadata={"format": "pt"}))


@dataclass(slots=True)
class Progress:
    step: int = 0
    loss: float = 0.0
    tokens: int = 0
    seconds: float = 0.0


class Counted:
    """Passes samples on and knows how many have gone by."""

    def __init__(self, source: Iterator[Sample]) -> None:
        self._source = source
        self.passed = 0

    def __iter__(self) -> Iterator[Sample]:
        for sample in self._source:
            self.passed += 1
            yield sample


def train(model: Any, source: Iterator[Batch], settings: Settings, folder: Path) -> Progress:
    """Goes on from DIR/state.pt if there is one; batches that were learned are skipped."""
    optimizers = _optimizers(model, settings)
    progress = _resumed(model, optimizers, folder)
    started = time.monotonic() - progress.seconds
    model.train()
    for step, batch in enumerate(islice(source, settings.steps)):
        if step < progress.step:
            continue
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = _rate(settings, step)
        loss = _loss(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        progress.step = step + 1
        progress.tokens += batch.ids.numel()
        progress.loss += max(0.02, 1 / progress.step) * (loss.item() - progress.loss)
        progress.seconds = time.monotonic() - started
        if progress.step % _REPORT_EVERY_STEPS == 0:
            _say(
                f"step {progress.step}  loss {progress.loss:.4f}  tokens {progress.tokens}  "
                f"seconds {progress.seconds:.0f}"
            )
        if progress.step % _SAVE_EVERY_STEPS == 0:
            save_weights(model, folder)
            _keep(model, optimizers, progress, folder)
    save_weights(model, folder)
    (folder / _STATE).unlink(missing_ok=True)
    return progress


def _keep(
    model: Any, optimizers: list[torch.optim.Optimizer], progress: Progress, folder: Path
) -> None:
    state = {
        "model": model.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in optimizers],
        "progress": asdict(progress),
    }
    torch.save(state, folder / _STATE)


def _resumed(model: Any, optimizers: list[torch.optim.Optimizer], folder: Path) -> Progress:
    if not (folder / _STATE).exists():
        return Progress()
    state = torch.load(folder / _STATE, weights_only=True)
    model.load_state_dict(state["model"])
    for optimizer, kept in zip(optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(kept)
    return Progress(**state["progress"])


def evaluate(folder: Path) -> dict[str, object]:
    """Scores the saved files, as anybody would load them."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.eval()
    scores, wrong = score(model, AutoTokenizer.from_pretrained(folder), heldout_items())
    for item, given in wrong:
        _say(f"wrong [{item.category}] {item.messages[-1]['content']} -> {given}")
    right = sum(s.right for s in scores.values())
    asked = sum(s.asked for s in scores.values())
    return {
        "score": round(right / asked, 4),
        "by_category": {name: f"{s.right}/{s.asked}" for name, s in scores.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=RATES[-1][0])
    parser.add_argument("--batch-tokens", type=int, default=2048)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    settings = Settings(
        options.seed,
        options.steps,
        options.batch_tokens,
        options.learning_rate,
    )
    folder: Path = options.out
    torch.set_num_threads(options.threads)
    torch.manual_seed(settings.seed)

    tokenizer = make_tokenizer(folder, settings.seed)
    end, stop = (int(tokenizer.vocab[text]) for text in ("<|im_end|>", "<|endoftext|>"))
    save_configs(folder, end, stop)
    model: Any = Qwen3ForCausalLM(Qwen3Config.from_dict(model_config(end, stop)))
    model.float()
    # On CPUs the backward pass of fused attention costs more than the rest of a layer.
    model.set_attn_implementation("eager")
    _say(f"{sum(p.numel() for p in model.parameters())} parameters, {len(tokenizer)} tokens")
    stream = Counted(samples(settings.seed))
    source = batches(stream, Rendering(tokenizer), settings.batch_tokens)
    progress = train(model, source, settings, folder)
    record = {
        **settings._asdict(),
        "samples": stream.passed,
        "tokens": progress.tokens,
        "training_seconds": round(progress.seconds),
        "loss": round(progress.loss, 4),
        "held_out": evaluate(folder),
        "versions": {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "tokenizers": tokenizers.__version__,
        },
    }
    (folder / "training.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    _say(json.dumps(record))


if __name__ == "__main__":
    main()
