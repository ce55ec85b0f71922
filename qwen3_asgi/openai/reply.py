"""What both kinds of reply share: identity, envelope, usage, and why a choice ended."""

from __future__ import annotations

import time
import uuid
from typing import TYPE_CHECKING, Any, ClassVar

from qwen3_asgi.openai.usage import usage

if TYPE_CHECKING:
    from collections.abc import Sequence

    from qwen3_asgi.openai.choice import ChoiceOutput
    from qwen3_asgi.openai.requests import GenerationRequest


class Reply:
    """One reply to `request`, made of one `ChoiceOutput` per choice."""

    _id_prefix: ClassVar[str]
    _kind: ClassVar[str]
    _chunk_kind: ClassVar[str]
    _counts_reasoning: ClassVar[bool]

    def __init__(self, request: GenerationRequest, outputs: Sequence[ChoiceOutput]) -> None:
        self._outputs = outputs
        self._include_usage = request.include_usage
        self._continuous_usage = request.continuous_usage
        self._id = f"{self._id_prefix}-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._model = request.model

    def usage_chunk(self) -> dict[str, Any]:
        """Return the last chunk of a stream with `include_usage`."""
        return {**self._envelope(self._chunk_kind), "choices": [], "usage": self._usage()}

    def _whole(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._envelope(self._kind), "choices": choices, "usage": self._usage()}

    def _chunk_of(self, choice: dict[str, Any]) -> dict[str, Any]:
        chunk = {**self._envelope(self._chunk_kind), "choices": [choice]}
        if self._continuous_usage:
            chunk["usage"] = self._usage()
        elif self._include_usage:
            chunk["usage"] = None
        return chunk

    def _finish_reason(self, index: int) -> str:
        finish = self._outputs[index].finish
        return "length" if finish is not None and finish.reason == "length" else "stop"

    def _envelope(self, kind: str) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._model,
            "system_fingerprint": None,
        }

    def _usage(self) -> dict[str, Any]:
        return usage(self._outputs, reasoning=self._counts_reasoning)
