"""What a fake model is to say: replies as text, turned into the tokens that the executor yields."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from qwen3_asgi.text.tokenizer import Tokenizer

# A map from what was asked to the reply, or a function from the whole prompt to the reply.
Replies = Mapping[str, str] | Callable[[str], str]

_USER, _END = "<|im_start|>user\n", "<|im_end|>"


def last_user_message(prompt: str) -> str:
    """The last thing that the user said in a prompt made by the chat template; else the prompt."""
    before, found, said = prompt.rpartition(_USER)
    del before
    return said.partition(_END)[0] if found else prompt


class ScriptedReplies:
    """From the prompt's token ids to the reply's. Called once for each request."""

    def __init__(self, replies: Replies, tokenizer: Tokenizer) -> None:
        self._replies = replies
        self._tokenizer = tokenizer

    def __call__(self, prompt_token_ids: Sequence[int]) -> list[int]:
        """
        Raises:
            LookupError: there is no reply to this prompt.
        """
        prompt = self._tokenizer.decode(prompt_token_ids, skip_special_tokens=False)
        return self._tokenizer.encode(self._text(prompt))

    def _text(self, prompt: str) -> str:
        if not isinstance(self._replies, Mapping):
            return self._replies(prompt)
        for asked in (prompt, last_user_message(prompt)):
            if asked in self._replies:
                return self._replies[asked]
        raise LookupError(f"the fake model has no reply to {last_user_message(prompt)!r}")
