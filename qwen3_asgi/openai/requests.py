"""The request models of the two generation routes, and the sampling they ask for.

Types are strict: JSON's `"0.5"` is not a number. Ranges are `SamplingParams`'s own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field

from qwen3_asgi.config import MAX_LOGPROBS, SamplingParams
from qwen3_asgi.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Iterable

MAX_PROMPTS = 64
MAX_TOOLS = 128
MAX_CACHE_SALT_CHARS = 256
# OpenAI's default for this route; chat has none.
COMPLETION_MAX_TOKENS = 16


class StreamOptions(BaseModel):
    """`include_obfuscation` pads events against traffic analysis; we never pad, so it is moot."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class TemplateOptions(BaseModel):
    """The one template variable a request may set: others would run the template on its terms."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    enable_thinking: bool | None = None


class GenerationRequest(BaseModel):
    """What both routes share. Unknown fields are kept, for `check_fields` to judge."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)

    model: str
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: str | None = Field(default=None, max_length=MAX_CACHE_SALT_CHARS)
    n: int | None = None
    timeout: float | None = None
    priority: int | None = None

    @property
    def choices(self) -> int:
        return 1 if self.n is None else self.n

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        options = self.stream_options
        return bool(self.include_usage and options and options.continuous_usage_stats)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def _params(self, *, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest(
                "stream_options is only allowed with stream=true", param="stream_options"
            )
        return SamplingParams(
            max_tokens=max_tokens,
            min_tokens=self.min_tokens or 0,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            seed=self.seed,
            stop=self.stop_strings,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
            logprobs=logprobs,
            n=self.choices,
        )


class ChatRequest(GenerationRequest):
    """Body of `POST /v1/chat/completions`. Messages are normalised with the template."""

    messages: list[dict[str, Any]]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = Field(default=None, max_length=MAX_TOOLS)
    tool_choice: str | dict[str, Any] | None = None
    chat_template_kwargs: TemplateOptions | None = None
    enable_thinking: bool | None = None

    @property
    def thinking(self) -> bool:
        nested = self.chat_template_kwargs and self.chat_template_kwargs.enable_thinking
        if nested is not None and self.enable_thinking not in (None, nested):
            raise InvalidRequest(
                "enable_thinking differs from chat_template_kwargs.enable_thinking",
                param="enable_thinking",
            )
        chosen = nested if nested is not None else self.enable_thinking
        return chosen is not False

    @property
    def offered_tools(self) -> list[dict[str, Any]] | None:
        """The tools that the model may call in this turn.

        Raises:
            InvalidRequest: a call is demanded, which can't be guaranteed, or a tool is malformed.
        """
        for i, tool in enumerate(self.tools or ()):
            _check_tool(tool, f"tools[{i}]")
        if self.tool_choice not in (None, "none", "auto"):
            raise InvalidRequest(
                "tool_choice must be 'none' or 'auto'",
                param="tool_choice",
                code="unsupported_parameter",
            )
        return None if self.tool_choice == "none" else self.tools or None

    def sampling(self) -> SamplingParams:
        """Raises: InvalidRequest naming the field that is out of range."""
        if self.top_logprobs is not None:
            if not 0 <= self.top_logprobs <= MAX_LOGPROBS:
                raise InvalidRequest(
                    f"top_logprobs must be 0 to {MAX_LOGPROBS}", param="top_logprobs"
                )
            if not self.logprobs and self.top_logprobs:
                raise InvalidRequest("top_logprobs needs logprobs=true", param="top_logprobs")
        limits = [n for n in (self.max_tokens, self.max_completion_tokens) if n is not None]
        return self._params(
            max_tokens=min(limits, default=None),
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
        )


class CompletionRequest(GenerationRequest):
    """Body of `POST /v1/completions`."""

    prompt: Any
    max_tokens: int | None = COMPLETION_MAX_TOKENS
    logprobs: int | None = None
    echo: bool | None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        """One entry per choice: a text, or token ids.

        Raises:
            InvalidRequest: the prompt is none of OpenAI's four forms, or too many.
        """
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if prompt is None:
            raise InvalidRequest(
                "missing required parameter: 'prompt'",
                param="prompt",
                code="missing_required_parameter",
            )
        if isinstance(prompt, list) and prompt:
            if _are_token_ids(prompt):
                return [prompt]
            if len(prompt) > MAX_PROMPTS:
                raise InvalidRequest(
                    f"prompt takes at most {MAX_PROMPTS} prompts, got {len(prompt)}", param="prompt"
                )
            if all(isinstance(item, str) for item in prompt) or all(
                isinstance(item, list) and _are_token_ids(item) for item in prompt
            ):
                return list(prompt)
        raise InvalidRequest(
            "prompt must be a string, a list of strings, a list of token ids, or a list of those, "
            "and not empty",
            param="prompt",
            code="invalid_type",
        )

    def sampling(self) -> SamplingParams:
        """Raises: InvalidRequest naming the field that is out of range."""
        if self.echo and self.logprobs is not None:
            raise InvalidRequest(
                "echo together with logprobs is not supported: prompts have no logprobs here",
                param="echo",
                code="unsupported_parameter",
            )
        return self._params(max_tokens=self.max_tokens, logprobs=self.logprobs)


def check_priority(priority: int | None, *, allowed: bool) -> int:
    """The priority that a request runs with.

    Raises:
        InvalidRequest: it asks for another than the others have, and the host does not let it.
    """
    if priority and not allowed:
        raise InvalidRequest(
            "priority is not allowed here", param="priority", code="unsupported_parameter"
        )
    return priority or 0


def choose_adapter(wanted: str, served: str, adapters: Iterable[str] = ()) -> str | None:
    """Which adapter a request's `model` names; None is the served model itself.

    Raises:
        InvalidRequest: it is neither (code `model_not_found`).
    """
    if wanted == served:
        return None
    if wanted in adapters:
        return wanted
    raise InvalidRequest(
        f"the model {wanted[:128]!r} does not exist", param="model", code="model_not_found"
    )


def _are_token_ids(items: list[Any]) -> bool:
    return all(type(item) is int for item in items)


def _check_tool(tool: dict[str, Any], where: str) -> None:
    if tool.get("type") != "function":
        raise InvalidRequest(
            f"{where}.type must be 'function'",
            param=f"{where}.type",
            code="unsupported_parameter",
        )
    function = tool.get("function")
    if not isinstance(function, dict):
        raise InvalidRequest(
            f"{where}.function must be an object", param=f"{where}.function", code="invalid_type"
        )
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise InvalidRequest(
            f"{where}.function.name must be a string",
            param=f"{where}.function.name",
            code="invalid_type",
        )
    if function.get("strict"):
        raise InvalidRequest(
            f"{where}.function.strict is not supported: arguments are not constrained",
            param=f"{where}.function.strict",
            code="unsupported_parameter",
        )
