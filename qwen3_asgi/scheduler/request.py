"""A request as the scheduler sees it: token ids in, token ids out, and where it stands.

Also `Limits`, and the one check that decides whether a request can ever fit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from qwen3_asgi.errors import ContextLengthExceeded, InvalidRequest
from qwen3_asgi.scheduler.plan import RequestId, Row, Sampling

if TYPE_CHECKING:
    from qwen3_asgi.scheduler.inbox import Cancelled
    from qwen3_asgi.scheduler.loading import Load

# Returns the stop string that the output now contains, or None. Called with each new token.
StopCheck = Callable[[int], str | None]


class State(StrEnum):
    """The queue a request is in. Waiting: the first three. Running: the last three."""

    DEFERRED = "deferred"
    LOADING = "loading"
    POST_CONTROL_DEFERRED = "post_control_deferred"
    PREFILLING = "prefilling"
    INFLIGHT = "inflight"
    ACTIVE = "active"


WAITING_STATES = (State.DEFERRED, State.LOADING, State.POST_CONTROL_DEFERRED)
RUNNING_STATES = (State.PREFILLING, State.INFLIGHT, State.ACTIVE)


@dataclass(frozen=True, slots=True)
class Limits:
    """What bounds a step and a request. Tokens, blocks and requests as the names say."""

    block_size: int
    num_kv_blocks: int
    max_context_tokens: int
    max_batch: int
    max_prefill_tokens: int

    @property
    def max_sequence_tokens(self) -> int:
        """Longest prompt plus output: the context, or what the whole KV pool can hold."""
        return min(self.max_context_tokens, self.num_kv_blocks * self.block_size)


class Request:
    """One generation. Every field below the line is owned by the scheduler thread.

    Args:
        request_id: never used again; a late cancel would hit its next owner.
        prompt_token_ids: at least one id.
        sampling: with every default filled in.
        max_tokens: most tokens to generate; None: as many as the context holds.
        min_tokens: stop tokens are banned until this many tokens are generated.
        eos_token_ids: end of sequence, empty to ignore it.
        stop_token_ids: further ids that end the output.
        stop_check: called with each token on the scheduler thread; see `StopCheck`.
        cache_salt: prefix-cache blocks are shared only between requests with the same salt.
        arrival: when it arrived, on the scheduler's clock, in seconds.
        adapter: name of the LoRA adapter it runs with; None is the base model.
        priority: the lower, the sooner admitted and the later preempted; arrival decides ties.
        deadline: on the scheduler's clock; it ends with `GenerationTimeout` then.
        fork_of: shares this request's prompt, and its prefill with it. Cancelling that one cancels
            this one, too. Submit it after that one.
    """

    __slots__ = (
        "adapter",
        "admission",
        "admitted",
        "admitted_at",
        "arrival",
        "blocks",
        "cache_root",
        "cache_salt",
        "cached_tokens",
        "capacity",
        "commit_at",
        "controls_before",
        "deadline",
        "digests",
        "end_len",
        "end_token_ids",
        "eos_token_ids",
        "finished",
        "first_token_at",
        "flying",
        "fork_of",
        "forks",
        "id",
        "last_token_at",
        "leaving",
        "lingering",
        "load",
        "load_began_at",
        "load_ended_at",
        "loaded_tokens",
        "max_tokens",
        "min_tokens",
        "num_committed",
        "num_computed",
        "num_preemptions",
        "offered_to_tiers",
        "priority",
        "prompt_len",
        "riding",
        "row",
        "sampling",
        "state",
        "stop_check",
        "stop_token_ids",
        "swept",
        "token_ids",
        "unforwarded",
        "watched",
    )

    def __init__(
        self,
        request_id: RequestId | str,
        prompt_token_ids: Sequence[int],
        *,
        sampling: Sampling | None = None,
        max_tokens: int | None = None,
        min_tokens: int = 0,
        eos_token_ids: Sequence[int] = (),
        stop_token_ids: Sequence[int] = (),
        stop_check: StopCheck | None = None,
        cache_salt: str = "",
        arrival: float = 0.0,
        adapter: str | None = None,
        priority: int = 0,
        deadline: float | None = None,
        fork_of: Request | None = None,
    ) -> None:
        self.id = RequestId(request_id)
        self.prompt_len = len(prompt_token_ids)
        self.sampling = sampling or Sampling()
        self.max_tokens = max_tokens
        self.min_tokens = min_tokens
        self.eos_token_ids = frozenset(eos_token_ids)
        self.stop_token_ids = frozenset(stop_token_ids)
        self.end_token_ids = self.eos_token_ids | self.stop_token_ids
        self.stop_check = stop_check
        self.cache_salt = cache_salt
        self.arrival = arrival
        self.adapter = adapter
        self.priority = priority
        self.deadline = deadline
        self.fork_of = fork_of
        # ---- owned by the scheduler thread from here on ----
        self.forks: tuple[Request, ...] = ()
        self.riding = False  # in `prefilling`, while the request that it forks prefills for both
        # Whether each token needs a closer look: a stop check, or stop tokens still banned.
        self.watched = stop_check is not None or min_tokens > 0
        self.state: State | None = None
        self.finished = False
        # The prompt, then the output. All but the last few are in the KV cache (`num_computed`).
        self.token_ids: list[int] = list(prompt_token_ids)
        self.end_len = self.prompt_len + (max_tokens or 0)
        self.num_computed = 0
        # Tokens of `num_computed` that were found and not forwarded, less those forwarded before a
        # preemption; `Scheduler.cancel` reads it from any thread: a stale int is all it may get.
        self.unforwarded = 0
        self.blocks: list[int] = []
        self.capacity = 0  # tokens that `blocks` can hold
        self.num_committed = 0  # full blocks that were offered to the prefix cache
        self.commit_at = 0  # `num_computed` at which the next one is full
        self.cache_root = b""
        self.digests: list[bytes] = []  # addresses of the first full blocks; tokens never change
        self.cached_tokens = 0
        self.row: Row | None = None  # of the newest step that carries it, or of the next one
        self.flying = 0  # launched steps that carry it and have not landed
        self.leaving = False  # it was cancelled in flight: nothing more is launched for it
        self.lingering: list[int] = []  # blocks that a step still reads though it has ended
        self.load: Load | None = None
        self.swept: Cancelled | None = None  # the cancel that ended it
        self.loaded_tokens = 0  # whose KV was copied in before its first admission
        self.offered_to_tiers = False
        self.controls_before = 0
        self.admission = 0  # counts admissions: the greater, the younger
        self.admitted = False
        self.num_preemptions = 0
        self.load_began_at: float | None = None
        self.load_ended_at: float | None = None
        self.admitted_at: float | None = None
        self.first_token_at: float | None = None
        self.last_token_at: float | None = None

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.prompt_len

    @property
    def remaining_tokens(self) -> int:
        """Tokens that must be forwarded before the next one can be sampled."""
        return len(self.token_ids) - self.num_computed

    @property
    def forwarded_tokens(self) -> int:
        """Tokens forwarded for this request so far, twice if it was preempted in between."""
        return self.num_computed - self.unforwarded


def check_fits(
    prompt_len: int, max_tokens: int | None, limits: Limits, *, param: str = "prompt"
) -> int:
    """Return the most tokens that may be generated.

    Raises:
        InvalidRequest: the prompt is empty.
        ContextLengthExceeded: prompt plus `max_tokens` (one, when absent) can never fit.
    """
    if prompt_len == 0:
        raise InvalidRequest("the prompt must have at least one token", param=param)
    limit = limits.max_sequence_tokens
    wanted = 1 if max_tokens is None else max_tokens
    if prompt_len + wanted > limit:
        asked = "" if max_tokens is None else f" plus max_tokens {max_tokens}"
        raise ContextLengthExceeded(
            f"this model's maximum context length is {limit} tokens, but the prompt has "
            f"{prompt_len} tokens{asked}",
            param=param,
        )
    return limit - prompt_len if max_tokens is None else max_tokens
