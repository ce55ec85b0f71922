"""Trains the byte-level BPE on the corpus and writes the two tokenizer files of the folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

if TYPE_CHECKING:
    from collections.abc import Iterable

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKUP = (
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>",
)  # fmt: skip
"""Added but not special: they survive `skip_special_tokens`."""

_PIECES = r" ?\p{L}+| ?[^\s\p{L}\p{N}]+[\r\n]*|\p{N}|\s*[\r\n]+|\s+(?!\S)|\s+"
MAX_CONTEXT_TOKENS = 4096


def chat_template() -> str:
    return (Path(__file__).parent / "template.jinja").read_text(encoding="utf-8").rstrip("\n")


def _added(text: str) -> AddedToken:
    return AddedToken(text, special=text in SPECIAL, normalized=False)


def train_tokenizer(texts: Iterable[str], owned_tokens: int) -> Tokenizer:
    """All 256 bytes are in the alphabet, so any text has tokens and comes back unchanged."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=owned_tokens - len(SPECIAL) - len(MARKUP),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([_added(text) for text in SPECIAL])
    tokenizer.add_tokens([_added(text) for text in MARKUP])
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": MAX_CONTEXT_TOKENS,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "additional_special_tokens": list(SPECIAL[1:]),
        "added_tokens_decoder": {
            str(tokenizer.token_to_id(text)): {
                "content": text,
                "lstrip": False,
                "normalized": False,
                "rstrip": False,
                "single_word": False,
                "special": text in SPECIAL,
            }
            for text in (*SPECIAL, *MARKUP)
        },
        "chat_template": chat_template(),
    }
    (folder / "tokenizer_config.json").write_text(
        json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
    )
