"""From what a caller passes to what the scheduler takes: token ids and filled-in sampling."""

from __future__ import annotations

import hashlib
import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
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
MAX_PRIORITY = 2**31 - 1
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
    adapter: str | None
    timeout: float | None
    priority: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One checked call of `Engine.submit`; fields as its arguments.

    Raises:
        InvalidRequest: not exactly one of the three ways to say what to continue; or `timeout` or
            `priority` is out of its range.
    """

    prompt: str | None = None
    messages: Messages | None = None
    prompt_token_ids: Sequence[int] | None = None
    params: SamplingParams | None = None
    tools: Sequence[Any] | None = None
    enable_thinking: bool = True
    cache_salt: str = ""
    adapter: str | None = None
    timeout: float | None = None
    priority: int = 0

    def __post_init__(self) -> None:
        given = [self.prompt, self.messages, self.prompt_token_ids]
        if sum(value is not None for value in given) != 1:
            raise InvalidRequest(
                "give exactly one of prompt, messages and prompt_token_ids", param="prompt"
            )
        if self.timeout is not None and not 0 < self.timeout < math.inf:
            raise InvalidRequest(
                f"timeout must be greater than 0, got {self.timeout}", param="timeout"
            )
        if not -MAX_PRIORITY <= self.priority <= MAX_PRIORITY:
            raise InvalidRequest(
                f"priority must be at least -{MAX_PRIORITY} and at most {MAX_PRIORITY}, "
                f"got {self.priority}",
                param="priority",
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


def make_requests(
    request_id: str,
    token_ids: list[int],
    ask: Ask,
    model: LoadedModel,
    *,
    arrival: float,
    deadline: float | None,
) -> list[Request]:
    """The scheduler's requests for these token ids, one an output; the others fork the first."""
    params = ask.sampling_params
    sampling = fill_in(params, model.defaults)
    requests: list[Request] = []
    for choice in range(params.n):
        request = Request(
            f"{request_id}-{choice}" if choice else request_id,
            token_ids,
            sampling=replace(sampling, seed=choice_seed(sampling.seed, choice)),
            max_tokens=params.max_tokens,
            min_tokens=params.min_tokens,
            eos_token_ids=() if params.ignore_eos else model.eos_token_ids,
            stop_token_ids=params.stop_token_ids,
            stop_check=StopStringCheck(model.tokenizer, params.stop) if params.stop else None,
            cache_salt=ask.cache_salt,
            arrival=arrival,
            adapter=ask.adapter,
            priority=ask.priority,
            deadline=deadline,
            fork_of=requests[0] if choice else None,
        )
        requests.append(request)
    return requests


def choice_seed(seed: int, choice: int) -> int:
    """The seed of one output. A sum would give neighbouring seeds each other's outputs."""
    if not choice:
        return seed
    digest = hashlib.blake2b(f"{seed}/{choice}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


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
