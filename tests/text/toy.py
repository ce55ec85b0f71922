"""A byte-level tokenizer small enough to read: 256 bytes, some merges, Qwen3's control tokens."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from qwen3_asgi.text.template import ChatTemplate
from qwen3_asgi.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from pathlib import Path

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
MERGES = (("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("<", "|"), ("i", "m"))
# Shaped like Qwen3's: enough to see roles, thinking, tools and tool calls.
TEMPLATE = """\
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}{% endfor %}<|im_end|>
{% endif -%}
{%- for m in messages %}<|im_start|>{{ m.role }}
{% if m.reasoning_content %}<think>
{{ m.reasoning_content }}
</think>

{% endif %}{{ m.content }}
{%- for call in m.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking is false %}<think>

</think>

{% endif %}{% endif -%}
"""


def toy_backend() -> tokenizers.Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: i for i, char in enumerate(alphabet)}
    for left, right in MERGES:
        vocab[left + right] = len(vocab)
    backend = tokenizers.Tokenizer(models.BPE(vocab, list(MERGES)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    backend.add_tokens([AddedToken(t, special=False, normalized=False) for t in TAGS])
    return backend


@cache
def toy_tokenizer() -> Tokenizer:
    return Tokenizer(toy_backend(), ChatTemplate(TEMPLATE))


def save_toy(folder: Path) -> None:
    toy_backend().save(str(folder / "tokenizer.json"))


def byte_ids(text: str | bytes) -> list[int]:
    """One token per byte, the finest split there is."""
    data = text.encode() if isinstance(text, str) else text
    tokenizer = toy_tokenizer()
    of_byte = {tokenizer.token_bytes(i): i for i in range(256)}
    return [of_byte[bytes([byte])] for byte in data]


def token(text: str) -> int:
    found = toy_tokenizer().token_id(text)
    assert found is not None
    return found
