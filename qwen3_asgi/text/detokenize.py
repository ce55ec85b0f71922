"""Token ids in one at a time, text out: a character appears once all of its bytes are there.

One `Detokenizer` per request and consumer. Concatenated output equals `Tokenizer.decode`.
"""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from qwen3_asgi.text.tokenizer import Tokenizer


class Detokenizer:
    """Incremental UTF-8 over token bytes: the cost of a token does not grow with the text.

    `tokenizers.decoders.DecodeStream` re-decodes what it holds back, without limit when a model
    emits broken UTF-8, and has no way to flush at the end.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """Return the text this token completes; special tokens have none."""
        if self._tokenizer.is_special(token_id):
            return ""
        return self._utf8.decode(self._tokenizer.token_bytes(token_id))

    def flush(self) -> str:
        """Return U+FFFD for an unfinished character, else nothing."""
        text = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return text
