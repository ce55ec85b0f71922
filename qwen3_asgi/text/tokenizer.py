"""The checkpoint's tokenizer: text or chat messages in, token ids out, and ids back to bytes.

Built from `tokenizer.json` and `tokenizer_config.json`. The engine loads it once and shares it
between threads: encoding is done off the event loop, decoding wherever tokens arrive.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qwen3_asgi.errors import InvalidRequest, ModelLoadError
from qwen3_asgi.text.escape import ControlSpellings, Marks
from qwen3_asgi.text.messages import normalise_messages

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import tokenizers

    from qwen3_asgi.text.template import ChatTemplate


class Tokenizer:
    """A byte-level BPE tokenizer and its chat template. Immutable after construction.

    With `vocab_size` it owns exactly the ids below that, whatever the file says, and those that
    have no token are written as numbers: for models whose weights mean nothing either.

    Raises:
        ModelLoadError: the tokenizer is not byte-level, so single tokens have no bytes, or it has
            more tokens than `vocab_size`.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        chat_template: ChatTemplate | None = None,
        *,
        vocab_size: int | None = None,
    ) -> None:
        if type(backend.decoder).__name__ != "ByteLevel":
            raise ModelLoadError("only byte-level BPE tokenizers (as Qwen3's) are supported")
        self._backend = backend
        self._template = chat_template
        self._plain = _without_added_tokens(backend)
        added = backend.get_added_tokens_decoder()
        self._special_ids = frozenset(i for i, token in added.items() if token.special)
        self._added_ids = {token.content: i for i, token in added.items()}
        control = [t.content for t in added.values() if t.special or t.content.startswith("<|")]
        tags = [t.content for t in added.values() if t.content not in control]
        self._spellings = ControlSpellings(control, tags)
        self._owned = _owned_ids(backend) if vocab_size is None else range(vocab_size)
        if vocab_size is not None and vocab_size < backend.get_vocab_size():
            raise ModelLoadError(
                f"vocab_size is {vocab_size}, less than the tokenizer's {backend.get_vocab_size()}"
            )
        # Written from any thread; a lost race only computes the same bytes twice.
        self._token_bytes: dict[int, bytes] = {}
        self._byte_of = _byte_alphabet()
        self.im_start_id = self.token_id("<|im_start|>")
        self.think_start_id = self.token_id("<think>")
        self.think_end_id = self.token_id("</think>")
        self.tool_call_start_id = self.token_id("<tool_call>")
        self.tool_call_end_id = self.token_id("</tool_call>")

    @classmethod
    def from_folder(cls, path: str | Path, *, vocab_size: int | None = None) -> Tokenizer:
        """Load the tokenizer of a checkpoint folder. `vocab_size` as in `Tokenizer`.

        Raises:
            ModelLoadError: `tokenizer.json` is missing, or a file cannot be read.
        """
        import tokenizers

        folder = Path(path)
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise ModelLoadError(f"{folder} has no tokenizer.json")
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exception
            raise ModelLoadError(f"{file} cannot be read: {error}") from error
        # A file may carry truncation or padding from training; here both would corrupt prompts.
        backend.no_truncation()
        backend.no_padding()
        return cls(backend, _chat_template(folder), vocab_size=vocab_size)

    @property
    def vocab_size(self) -> int:
        """How many token ids the tokenizer owns; the model may have more rows."""
        return len(self._owned)

    @property
    def owned_token_ids(self) -> range | frozenset[int]:
        """The ids that stand for a token. Rows of the model outside it must not be used."""
        return self._owned

    def token_id(self, token: str) -> int | None:
        return self._backend.token_to_id(token)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a raw prompt; control tokens written in it are parsed as such.

        Raises:
            InvalidRequest: the text has a lone surrogate, which has no UTF-8 form.
        """
        return _encode(self._backend, text, "prompt")

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        enable_thinking: bool = True,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """Return the ids of a conversation as the chat template writes it.

        Control tokens spelled inside message text become plain characters.

        Raises:
            InvalidRequest: the messages are malformed, or the template refuses them.
        """
        if self._template is None:
            raise InvalidRequest("this model has no chat template", param="messages")
        marks = Marks()
        rendered = self._template.render(
            self._spellings.escape_messages(normalise_messages(messages), marks),
            tools=self._spellings.escape(tools, marks) if tools else None,
            enable_thinking=enable_thinking,
            add_generation_prompt=add_generation_prompt,
        )
        if not marks.used:
            return _encode(self._backend, rendered, "messages")
        ids: list[int] = []
        for piece in self._spellings.split(rendered, marks):
            if piece.control:
                ids.append(self._added_ids[piece.text])
            else:
                ids.extend(_encode(self._plain, piece.text, "messages"))
        return ids

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of ids; broken UTF-8 becomes U+FFFD."""
        skipped = self._special_ids if skip_special_tokens else frozenset()
        data = b"".join(self.token_bytes(i) for i in token_ids if i not in skipped)
        return data.decode("utf-8", "replace")

    def is_special(self, token_id: int) -> bool:
        """Whether the token is left out of text (`<|im_end|>`; not `<think>`)."""
        return token_id in self._special_ids

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes a token stands for; an id without a token has none."""
        data = self._token_bytes.get(token_id)
        if data is None:
            token = self._backend.id_to_token(token_id)
            if token is None:
                # Never a real token: see `vocab_size` of the class. A space separates numbers.
                token = f"\u0120{token_id}" if token_id in self._owned else ""
            try:
                data = bytes(self._byte_of[char] for char in token)
            except KeyError:  # an added token with characters outside the byte alphabet
                data = token.encode()
            self._token_bytes[token_id] = data
        return data


def _encode(backend: tokenizers.Tokenizer, text: str, param: str) -> list[int]:
    try:
        return backend.encode(text, add_special_tokens=False).ids
    except (TypeError, UnicodeEncodeError) as error:
        raise InvalidRequest(f"{param} is not valid Unicode text", param=param) from error


def _without_added_tokens(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """The same model with no control tokens; it shares the vocabulary, so it costs nothing."""
    import tokenizers

    plain = tokenizers.Tokenizer(backend.model)
    if backend.normalizer is not None:
        plain.normalizer = backend.normalizer
    if backend.pre_tokenizer is not None:
        plain.pre_tokenizer = backend.pre_tokenizer
    return plain


def _owned_ids(backend: tokenizers.Tokenizer) -> range | frozenset[int]:
    ids = frozenset(backend.get_vocab(with_added_tokens=True).values())
    # The usual case; a range answers `in` without holding 150,000 ints.
    dense = range(len(ids))
    return dense if ids and max(ids) == len(ids) - 1 else ids


def _byte_alphabet() -> dict[str, int]:
    """Byte-level BPE writes each byte as one printable character: itself, or one from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet |= {chr(0x100 + i): byte for i, byte in enumerate(others)}
    return alphabet


def _chat_template(folder: Path) -> ChatTemplate | None:
    from qwen3_asgi.text.template import ChatTemplate

    config: dict[str, Any] = {}
    try:
        if (folder / "tokenizer_config.json").is_file():
            config = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
        source = config.get("chat_template")
        if (folder / "chat_template.jinja").is_file():
            source = (folder / "chat_template.jinja").read_text("utf-8")
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{folder}: the tokenizer's settings cannot be read: {error}") from (
            error
        )
    if isinstance(source, list):  # named templates
        named = {entry["name"]: entry["template"] for entry in source}
        source = named.get("default")
    if not isinstance(source, str):
        return None
    variables: dict[str, str] = {}
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        token = config.get(name)
        if isinstance(token, dict):
            token = token.get("content")
        if isinstance(token, str):
            variables[name] = token
    return ChatTemplate(source, variables)
