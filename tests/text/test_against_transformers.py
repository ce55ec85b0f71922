"""The bundled model's prompts are, id for id, those that transformers makes of them."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from qwen3_asgi.text.tokenizer import Tokenizer
from qwen3_asgi.tiny import tiny_path

TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "description": "dé <b> 'q'",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}
CALL = {"type": "function", "function": {"name": "f", "arguments": {"a": [1, None, "é"]}}}
CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "hi  there\n"}],
    [{"role": "system", "content": "s"}, {"role": "user", "content": "日本語 🙂"}],
    [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "<think>\nx\n</think>\n\nans"},
        {"role": "user", "content": "q2"},
    ],
    [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "", "reasoning_content": "r", "tool_calls": [CALL, CALL]},
        {"role": "tool", "content": "42"},
        {"role": "tool", "content": "43"},
    ],
]


def prompt_of(reference: Any, messages: Any, tools: Any, thinking: bool) -> list[int]:
    """What transformers makes of a conversation."""
    return list(
        reference.apply_chat_template(
            messages,
            tools=tools,
            enable_thinking=thinking,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=False,
        )
    )


@pytest.fixture(scope="module")
def reference() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_path())


@pytest.mark.parametrize(
    ("messages", "tools", "thinking"),
    list(itertools.product(CONVERSATIONS, (None, [TOOL]), (True, False))),
)
def test_same_ids(reference: Any, messages: Any, tools: Any, thinking: bool) -> None:
    ours = Tokenizer.from_folder(tiny_path())
    ids = ours.encode_chat(messages, tools=tools, enable_thinking=thinking)
    assert ids == prompt_of(reference, messages, tools, thinking)
    assert ours.decode(ids) == reference.decode(ids, skip_special_tokens=True)


def test_same_vocabulary(reference: Any) -> None:
    ours = Tokenizer.from_folder(tiny_path())
    assert ours.vocab_size == len(reference)
    assert set(ours.owned_token_ids) == set(reference.get_vocab().values())
