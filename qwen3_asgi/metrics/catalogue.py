"""Every family there is: its name, help, labels and buckets. The docs' tables come from here.

Names and buckets that begin with `vllm:` are those of vLLM's v1 engine, so that dashboards,
autoscalers and gateways made for it read ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

if TYPE_CHECKING:
    from collections.abc import Iterable

# The labels of every family, in this order, before a family's own.
ENGINE_LABELS = ("model_name", "engine")

Kind = Literal["gauge", "counter", "histogram"]
MultiprocessMode = Literal["livesum", "livemax"]


@dataclass(frozen=True, slots=True)
class Family:
    """One metric family. `name` is the one in the text format, counters with their `_total`."""

    kind: ClassVar[Kind]
    name: str
    help: str
    own_labels: tuple[str, ...] = ()

    @property
    def labels(self) -> tuple[str, ...]:
        return ENGINE_LABELS + self.own_labels


@dataclass(frozen=True, slots=True, kw_only=True)
class GaugeFamily(Family):
    kind = "gauge"
    multiprocess_mode: MultiprocessMode


@dataclass(frozen=True, slots=True)
class CounterFamily(Family):
    kind = "counter"


@dataclass(frozen=True, slots=True, kw_only=True)
class HistogramFamily(Family):
    kind = "histogram"
    buckets: tuple[float, ...]


# fmt: off
FIRST_TOKEN_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)
INTER_TOKEN_BUCKETS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0,
)
REQUEST_BUCKETS = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0,
    240.0, 480.0, 960.0, 1920.0, 7680.0,
)
STEP_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
)
SWEEP_BUCKETS = (
    0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.1,
)
# fmt: on

NUM_REQUESTS_RUNNING = GaugeFamily(
    "vllm:num_requests_running",
    "Requests that are prefilling, in flight or decoding.",
    multiprocess_mode="livesum",
)
NUM_REQUESTS_WAITING = GaugeFamily(
    "vllm:num_requests_waiting",
    "Requests that have arrived and are not admitted yet.",
    multiprocess_mode="livesum",
)
NUM_REQUESTS_WAITING_BY_REASON = GaugeFamily(
    "vllm:num_requests_waiting_by_reason",
    "The waiting requests by what they wait for: capacity, loading or control.",
    ("reason",),
    multiprocess_mode="livesum",
)
# Every process has a pool of its own. The fullest one says whether the next request may have to
# wait; a sum would pass 1, and the most recent would jump from process to process.
KV_CACHE_USAGE = GaugeFamily(
    "vllm:kv_cache_usage_perc",
    "Part of the KV cache that live requests hold; 1 means 100 percent.",
    multiprocess_mode="livemax",
)
PROMPT_TOKENS = CounterFamily(
    "vllm:prompt_tokens_total", "Prompt tokens of requests whose prefill is complete."
)
GENERATION_TOKENS = CounterFamily("vllm:generation_tokens_total", "Tokens generated.")
REQUEST_SUCCESS = CounterFamily(
    "vllm:request_success_total",
    "Requests that ended, by reason: stop, length, abort or error.",
    ("finished_reason",),
)
PREFIX_CACHE_QUERIES = CounterFamily(
    "vllm:prefix_cache_queries_total", "Prompt tokens looked up in the prefix cache."
)
PREFIX_CACHE_HITS = CounterFamily(
    "vllm:prefix_cache_hits_total", "Prompt tokens found in the prefix cache."
)
EXTERNAL_PREFIX_CACHE_QUERIES = CounterFamily(
    "vllm:external_prefix_cache_queries_total",
    "Prompt tokens that the prefix cache of the device did not have, looked up in the lower tiers.",
)
EXTERNAL_PREFIX_CACHE_HITS = CounterFamily(
    "vllm:external_prefix_cache_hits_total",
    "Prompt tokens whose KV was copied in from host memory or the file.",
)
NUM_PREEMPTIONS = CounterFamily(
    "vllm:num_preemptions_total", "Times a running request had to give its KV blocks back."
)
TIME_TO_FIRST_TOKEN = HistogramFamily(
    "vllm:time_to_first_token_seconds",
    "Time from a request's arrival to its first token.",
    buckets=FIRST_TOKEN_BUCKETS,
)
INTER_TOKEN_LATENCY = HistogramFamily(
    "vllm:inter_token_latency_seconds",
    "Time between two tokens of a request.",
    buckets=INTER_TOKEN_BUCKETS,
)
E2E_REQUEST_LATENCY = HistogramFamily(
    "vllm:e2e_request_latency_seconds",
    "Time from arrival to the last token, of requests that ran to their end.",
    buckets=REQUEST_BUCKETS,
)
REQUEST_QUEUE_TIME = HistogramFamily(
    "vllm:request_queue_time_seconds",
    "Time from arrival to admission, of requests that ran to their end.",
    buckets=REQUEST_BUCKETS,
)
REQUEST_PREFILL_TIME = HistogramFamily(
    "vllm:request_prefill_time_seconds",
    "Time from admission to the first token, of requests that ran to their end.",
    buckets=REQUEST_BUCKETS,
)
REQUEST_DECODE_TIME = HistogramFamily(
    "vllm:request_decode_time_seconds",
    "Time from the first to the last token, of requests that ran to their end.",
    buckets=REQUEST_BUCKETS,
)
REQUESTS_CANCELLED = CounterFamily(
    "qwen3_asgi_requests_cancelled_total",
    "Requests dropped by a sweep, by the queue they were in.",
    ("state",),
)
WASTED_TOKENS = CounterFamily(
    "qwen3_asgi_wasted_tokens_total", "Tokens computed for a request after it was cancelled."
)
PREFILL_TOKENS_AVOIDED = CounterFamily(
    "qwen3_asgi_prefill_tokens_avoided_total",
    "Prompt tokens of cancelled requests that were never computed.",
)
CLIENT_DISCONNECTS = CounterFamily(
    "qwen3_asgi_client_disconnects_total",
    "Clients that left before their response was complete, by how far it was.",
    ("phase",),
)
REQUEST_TIMEOUTS = CounterFamily(
    "qwen3_asgi_request_timeouts_total", "Requests that were not finished by their deadline."
)
LORA_ADAPTERS = GaugeFamily(
    "qwen3_asgi_lora_adapters",
    "LoRA adapters that are loaded.",
    multiprocess_mode="livemax",
)
EVENT_LOOP_WAKEUPS = CounterFamily(
    "qwen3_asgi_event_loop_wakeups_total", "Times an event loop was woken to deliver tokens."
)
STEP_SECONDS = HistogramFamily(
    "qwen3_asgi_step_seconds",
    "Time of one forward pass, by what was in its batch: prefill, decode or mixed.",
    ("kind",),
    buckets=STEP_BUCKETS,
)
STEP_FAILURES = CounterFamily(
    "qwen3_asgi_step_failures_total", "Forward passes that failed, and ended all their requests."
)
STALLED_STEPS = CounterFamily(
    "qwen3_asgi_stalled_steps_total", "Forward passes that ran longer than step_warn_seconds."
)
SWEEP_SECONDS = HistogramFamily(
    "qwen3_asgi_sweep_seconds",
    "Time of a sweep that dropped cancelled requests.",
    buckets=SWEEP_BUCKETS,
)

CATALOGUE: tuple[GaugeFamily | CounterFamily | HistogramFamily, ...] = (
    NUM_REQUESTS_RUNNING,
    NUM_REQUESTS_WAITING,
    NUM_REQUESTS_WAITING_BY_REASON,
    KV_CACHE_USAGE,
    PROMPT_TOKENS,
    GENERATION_TOKENS,
    REQUEST_SUCCESS,
    PREFIX_CACHE_QUERIES,
    PREFIX_CACHE_HITS,
    EXTERNAL_PREFIX_CACHE_QUERIES,
    EXTERNAL_PREFIX_CACHE_HITS,
    NUM_PREEMPTIONS,
    TIME_TO_FIRST_TOKEN,
    INTER_TOKEN_LATENCY,
    E2E_REQUEST_LATENCY,
    REQUEST_QUEUE_TIME,
    REQUEST_PREFILL_TIME,
    REQUEST_DECODE_TIME,
    REQUESTS_CANCELLED,
    WASTED_TOKENS,
    PREFILL_TOKENS_AVOIDED,
    REQUEST_TIMEOUTS,
    LORA_ADAPTERS,
    CLIENT_DISCONNECTS,
    EVENT_LOOP_WAKEUPS,
    STEP_SECONDS,
    STEP_FAILURES,
    STALLED_STEPS,
    SWEEP_SECONDS,
)


def catalogue_markdown() -> str:
    """The tables of docs/metrics.md: all families, then the buckets of the histograms."""
    families = (
        (
            f"`{family.name}`",
            family.kind,
            ", ".join(f"`{label}`" for label in family.own_labels),
            family.multiprocess_mode if isinstance(family, GaugeFamily) else "sum",
            family.help,
        )
        for family in CATALOGUE
    )
    buckets = (
        (f"`{family.name}`", ", ".join(f"{bound:g}" for bound in family.buckets))
        for family in CATALOGUE
        if isinstance(family, HistogramFamily)
    )
    return "\n\n".join(
        (
            _table(("name", "type", "own labels", "over processes", "meaning"), families),
            _table(("histogram", "upper bounds in seconds"), buckets),
        )
    )


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
