"""From what a caller passes to what the scheduler takes: token ids and filled-in sampling."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from operator import index
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar

from qwen3_asgi.config import SamplingParams
from qwen3_asgi.errors import InvalidRequest
from qwen3_asgi.scheduler.plan import Sampling
from qwen3_asgi.scheduler.request import Request
from qwen3_asgi.text.stop import StopStringCheck

if TYPE_CHECKING:
    from qwen3_asgi.engine.loading import LoadedModel, SamplingDefaults
    from qwen3_asgi.text.tokenizer import Tokenizer

Messages = Sequence[Any]
T = TypeVar("T")


class Asked(TypedDict, total=False):
    """The keyword arguments of `Engine.submit`, which its docstring explains."""

    prompt: str | None
    messages: Messages | None
    prompt_token_ids: Sequence[int] | None
    params: SamplingParams | None
    tools: Sequence[Any] | None
    enable_thinking: bool
    cache_salt: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One checked call of `Engine.submit`; fields as its arguments.

    Raises:
        InvalidRequest: not exactly one of the three ways to say what to continue.
    """

    prompt: str | None = None
    messages: Messages | None = None
    prompt_token_ids: Sequence[int] | None = None
    params: SamplingParams | None = None
    tools: Sequence[Any] | None = None
    enable_thinking: bool = True
    cache_salt: str = ""

    def __post_init__(self) -> None:
        given = [self.prompt, self.messages, self.prompt_token_ids]
        if sum(value is not None for value in given) != 1:
            raise InvalidRequest(
                "give exactly one of prompt, messages and prompt_token_ids", param="prompt"
            )

    @property
    def sampling_params(self) -> SamplingParams:
        return self.params or SamplingParams()

    @property
    def param(self) -> str:
        return "messages" if self.messages is not None else "prompt"

    def encode(self, tokenizer: Tokenizer) -> list[int]:
        """Token ids. May take milliseconds: not for an event loop."""
        if self.prompt_token_ids is not None:
            return check_token_ids(self.prompt_token_ids, tokenizer)
        if self.messages is not None:
            return tokenizer.encode_chat(
                self.messages, tools=self.tools, enable_thinking=self.enable_thinking
            )
        return tokenizer.encode(self.prompt or "")


def check_token_ids(token_ids: Sequence[int], tokenizer: Tokenizer) -> list[int]:
    """
    Raises:
        InvalidRequest: not an integer, or an id that no token owns; its embedding row was never
            trained.
    """
    owned = tokenizer.owned_token_ids
    checked: list[int] = []
    for token_id in token_ids:
        try:
            plain = int(index(token_id))  # also of numpy; 1.0 would fail in the middle of a step
        except TypeError:
            raise InvalidRequest(f"{token_id!r} is not a token id", param="prompt") from None
        if plain not in owned:
            raise InvalidRequest(
                f"prompt has a token id {plain} that is no token's", param="prompt"
            )
        checked.append(plain)
    return checked


def make_request(
    request_id: str,
    token_ids: list[int],
    params: SamplingParams,
    model: LoadedModel,
    *,
    cache_salt: str,
    arrival: float,
) -> Request:
    """The scheduler's request for these token ids."""
    return Request(
        request_id,
        token_ids,
        sampling=fill_in(params, model.defaults),
        max_tokens=params.max_tokens,
        min_tokens=params.min_tokens,
        eos_token_ids=() if params.ignore_eos else model.eos_token_ids,
        stop_token_ids=params.stop_token_ids,
        stop_check=StopStringCheck(model.tokenizer, params.stop) if params.stop else None,
        cache_salt=cache_salt,
        arrival=arrival,
    )


def fill_in(params: SamplingParams, defaults: SamplingDefaults) -> Sampling:
    """Every default filled in; an absent seed is drawn from the system, not from a global state."""
    seed = secrets.randbits(63) if params.seed is None else params.seed
    return Sampling(
        temperature=_or(params.temperature, defaults.temperature),
        top_k=_or(params.top_k, defaults.top_k),
        top_p=_or(params.top_p, defaults.top_p),
        min_p=_or(params.min_p, defaults.min_p),
        seed=seed,
        logprobs=params.logprobs,
    )


def _or(value: T | None, default: T) -> T:
    return default if value is None else value
