"""Load against OpenAI-compatible servers: output tokens per second, time to first token, time
between tokens, errors by kind.

Closed loop with a number of clients, or Poisson arrivals. With several servers the rounds take
turns, first to last and then last to first, so that what slows the machine down slows them all;
every figure is the median of the rounds, and ratios are of these.
"""

from __future__ import annotations

import json
import statistics
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from qwen3_asgi.bench.chart import Series, line_chart
from qwen3_asgi.bench.figures import columns, quantile
from qwen3_asgi.bench.serve_client import run_load
from qwen3_asgi.bench.serve_work import Length, Request, Server, draw_lengths, poisson
from qwen3_asgi.bench.wire import Target

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from qwen3_asgi.bench.serve_wire import Answer

WARM_UP_TOKENS = 4
# Requests of a round for each client; so many with Poisson arrivals.
REQUESTS_PER_CLIENT, REQUESTS_OF_A_RATE = 4, 32
# Fields of a round that are percentiles.
PERCENTILES = ("ttft_ms", "itl_ms", "latency_ms")
DEFAULT_PROMPT, DEFAULT_OUTPUT = Length(128, 128), Length(64, 64)


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """A row for each prompt length with each number of clients, or with each rate if there are any.

    `requests` of each round; None: four for each client, or 32.
    """

    request: Request
    clients: tuple[int, ...] = (8,)
    rates: tuple[float, ...] = ()
    prompts: tuple[Length, ...] = (DEFAULT_PROMPT,)
    output: Length = DEFAULT_OUTPUT
    requests: int | None = None
    rounds: int = 3
    seed: int = 0


class Percentiles(NamedTuple):
    """Milliseconds."""

    p50: float
    p95: float
    p99: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Percentiles:
        """Of samples; zeros when there are none, as of the time between tokens when all answers
        have a single one."""
        ordered = sorted(seconds) or [0.0]
        return cls(*(round(quantile(ordered, share) * 1000, 3) for share in (0.5, 0.95, 0.99)))


@dataclass(frozen=True, slots=True)
class Round:
    """One round. `turn` counts the rounds of all servers in the order in which they were run.

    `requests == answered + sum(errors)`; the other figures are of the answered. `cut_short` had
    fewer tokens than asked for. `client_cpu` is this process's CPU time per second of the round.
    """

    turn: int
    seconds: float
    requests: int
    answered: int
    errors: dict[str, int]
    cut_short: int
    prompt_tokens: int
    output_tokens: float
    output_tokens_per_second: float
    requests_per_second: float
    ttft_ms: Percentiles
    itl_ms: Percentiles
    latency_ms: Percentiles
    client_cpu: float


@dataclass(frozen=True, slots=True)
class Row:
    """All rounds of one server under one load: `clients` or `rate`."""

    server: str
    prompt: str
    clients: int | None
    rate: float | None
    rounds: tuple[Round, ...]

    @property
    def load(self) -> str:
        return f"{self.clients}" if self.rate is None else f"{self.rate:g}/s"

    def median(self, read: Callable[[Round], float]) -> float:
        return statistics.median(map(read, self.rounds))

    def figures(self) -> dict[str, float]:
        """Medians of the rounds, and the errors of all of them."""
        found = {
            "output_tokens_per_second": self.median(lambda each: each.output_tokens_per_second),
            "requests_per_second": self.median(lambda each: each.requests_per_second),
        }
        for kind in PERCENTILES:
            for name in Percentiles._fields:
                each = [getattr(getattr(one, kind), name) for one in self.rounds]
                found[f"{kind}_{name}"] = statistics.median(each)
        found["errors"] = sum(sum(each.errors.values()) for each in self.rounds)
        return {name: round(value, 3) for name, value in found.items()}


@dataclass(frozen=True, slots=True)
class ServeReport:
    """`refused` has the request fields that a server would not take, `no_usage` the servers whose
    tokens were counted by events, `models` what each was asked for."""

    options: ServeOptions
    rows: tuple[Row, ...]
    refused: dict[str, list[str]] = field(default_factory=dict)
    no_usage: tuple[str, ...] = ()
    models: dict[str, str] = field(default_factory=dict)

    def ratios(self) -> list[tuple[Row, Row, dict[str, float]]]:
        """The first server's figures by those of each other under the same load."""
        first = self.rows[0].server
        found = []
        for ours in (row for row in self.rows if row.server == first):
            for theirs in self.rows:
                if theirs.server != first and (theirs.prompt, theirs.load) == (
                    ours.prompt,
                    ours.load,
                ):
                    by = theirs.figures()
                    of = {
                        name: round(value / by[name], 3)
                        for name, value in ours.figures().items()
                        if name != "errors" and by[name]
                    }
                    found.append((ours, theirs, of))
        return found

    def to_json(self) -> str:
        options = asdict(self.options)
        options["request"].pop("api_key")
        rows = [
            {
                **asdict(row),
                **row.figures(),
                "rounds": [
                    {
                        **asdict(each),
                        **{name: getattr(each, name)._asdict() for name in PERCENTILES},
                    }
                    for each in row.rounds
                ],
            }
            for row in self.rows
        ]
        ratios = [
            {"server": a.server, "by": b.server, "prompt": a.prompt, "load": a.load, **of}
            for a, b, of in self.ratios()
        ]
        more = {"refused": self.refused, "no_usage": self.no_usage, "models": self.models}
        return json.dumps({"options": options, **more, "rows": rows, "ratios": ratios})


def table(report: ServeReport) -> str:
    """The report as lines for a person."""
    rows: list[list[str]] = [
        [
            *("server", "load", "prompt", "output tok/s", "TTFT ms p50", "p95", "p99"),
            *("ITL ms p50", "p95", "p99", "req/s", "client CPU"),
        ]
    ]
    notes = []
    for row in report.rows:
        found = row.figures()
        names = [f"{kind}_ms_{name}" for kind in ("ttft", "itl") for name in Percentiles._fields]
        rows.append(
            [
                row.server,
                row.load,
                row.prompt,
                f"{found['output_tokens_per_second']:,.1f}",
                *(f"{found[name]:,.1f}" for name in names),
                f"{found['requests_per_second']:.2f}",
                f"{row.median(lambda each: each.client_cpu):.0%}",
            ]
        )
        where = f"{row.server}, load {row.load}, prompt {row.prompt}"
        kinds = sum((Counter(each.errors) for each in row.rounds), Counter[str]())
        if kinds:
            notes.append(f"{where}: {_kinds(kinds)} of {sum(r.requests for r in row.rounds)}")
        if short := sum(each.cut_short for each in row.rounds):
            notes.append(f"{where}: {short} answers shorter than asked for")
    for url, names in report.refused.items():
        if names:
            notes.append(f"{url} refuses {', '.join(names)}: left out")
    notes += [f"{url} reports no usage: an event is taken for a token" for url in report.no_usage]
    for ours, theirs, of in report.ratios():
        wanted = ("output_tokens_per_second", "ttft_ms_p50", "itl_ms_p50", "latency_ms_p50")
        words = zip(("output tok/s", "TTFT", "ITL", "latency"), wanted, strict=True)
        figures = ", ".join(f"{word} {of[name]:.2f}x" for word, name in words if name in of)
        notes.append(
            f"{ours.server} / {theirs.server}, load {ours.load}, prompt {ours.prompt}: {figures}"
        )
    return "\n".join([columns(rows), *notes])


def chart(report: ServeReport) -> str:
    """Output tokens per second as an SVG: by load if there are several loads, else by prompt."""
    loads = {row.load for row in report.rows}
    by_prompt = len(loads) == 1 and len({row.prompt for row in report.rows}) > 1
    servers = {row.server for row in report.rows}
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in report.rows:
        at = Length.parse(row.prompt)
        x = (at.low + at.high) / 2 if by_prompt else row.clients or row.rate or 0.0
        name = [row.server] if len(servers) > 1 else []
        name += [f"load {row.load}" if by_prompt else f"prompt {row.prompt}"]
        y = row.figures()["output_tokens_per_second"]
        lines.setdefault(", ".join(name), []).append((float(x), y))
    label = "prompt tokens" if by_prompt else "requests/s" if report.options.rates else "clients"
    title = f"output tokens per second, {report.options.output} tokens an answer"
    return line_chart(title, label, [Series(name, tuple(at)) for name, at in lines.items()])


def run_serve(urls: Sequence[str], options: ServeOptions) -> ServeReport:
    """Load each server in turn.

    Raises:
        ValueError: nothing to do, no server there, or one that answered nothing of a round.
    """
    _check(options)
    servers = [
        Server(url, Target.parse(url), options.request, place) for place, url in enumerate(urls)
    ]
    calibration, *_ = [server.meet() for server in servers]
    rows: list[Row] = []
    loads: list[tuple[int | None, float | None]] = [(count, None) for count in options.clients]
    if options.rates:
        loads = [(None, rate) for rate in options.rates]
    turn = 0
    for prompt in options.prompts:
        for clients, rate in loads:
            rounds: list[list[Round]] = [[] for _ in servers]
            for number in range(-1, options.rounds):  # the first is the warm-up
                order = range(len(servers))
                for place in order if number % 2 == 0 else reversed(order):
                    salt = (options.seed, str(prompt), clients, rate, number)
                    warm_up = number < 0
                    load = _Load(options, prompt, clients, rate, salt, warm_up=warm_up)
                    found = load.run(servers[place], calibration, turn)
                    if not warm_up:
                        rounds[place].append(found)
                        turn += 1
            rows += [
                Row(server.url, str(prompt), clients, rate, tuple(done))
                for server, done in zip(servers, rounds, strict=True)
            ]
    return ServeReport(
        options,
        tuple(rows),
        {server.url: server.refused for server in servers},
        tuple(server.url for server in servers if not server.reports_usage),
        {server.url: server.model for server in servers},
    )


@dataclass(frozen=True, slots=True)
class _Load:
    """One round's work, as every server gets it."""

    options: ServeOptions
    prompt: Length
    clients: int | None
    rate: float | None
    salt: object
    warm_up: bool

    def run(self, server: Server, calibration: tuple[float, float], turn: int) -> Round:
        options = self.options
        if self.clients is not None:
            count = options.requests or self.clients * REQUESTS_PER_CLIENT
        else:
            count = options.requests or REQUESTS_OF_A_RATE
        output = options.output
        if self.warm_up:
            few = min(WARM_UP_TOKENS, output.low)
            count, output = min(count, self.clients or 1), Length(few, few)
        lengths = draw_lengths(count, self.prompt, output, self.salt)
        work = server.work(lengths, calibration, self.salt)
        moments = None
        if self.rate is not None:
            moments = poisson(count, self.rate, self.salt)
        begin, cpu = time.perf_counter(), time.process_time()
        answers = run_load(server.endpoint, work, clients=self.clients, moments=moments)
        seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
        if all(answer.error for answer in answers):
            kinds = _kinds(Counter(answer.error for answer in answers))
            raise ValueError(
                f"{server.url} answered none of {count} requests: {kinds}; {answers[-1].detail}"
            )
        return _round(answers, turn, seconds, cpu)


def _round(answers: list[Answer], turn: int, seconds: float, cpu: float) -> Round:
    good = [answer for answer in answers if not answer.error]
    tokens = sum(answer.output_tokens for answer in good)
    return Round(
        turn=turn,
        seconds=round(seconds, 4),
        requests=len(answers),
        answered=len(good),
        errors=dict(Counter(answer.error for answer in answers if answer.error)),
        cut_short=sum(answer.output_tokens < answer.asked for answer in good),
        prompt_tokens=sum(answer.prompt_tokens or 0 for answer in good),
        output_tokens=round(tokens, 3),
        output_tokens_per_second=round(tokens / seconds, 3),
        requests_per_second=round(len(good) / seconds, 3),
        ttft_ms=Percentiles.of([answer.ttft for answer in good]),
        itl_ms=Percentiles.of([gap for answer in good for gap in answer.gaps()]),
        latency_ms=Percentiles.of([answer.end - answer.begin for answer in good]),
        client_cpu=round(cpu / seconds, 3),
    )


def _kinds(kinds: Counter[str]) -> str:
    return ", ".join(f"{count} x {kind}" for kind, count in kinds.most_common())


def _check(options: ServeOptions) -> None:
    for name, values in (
        ("clients", options.clients),
        ("rate", options.rates),
        ("rounds", (options.rounds,)),
        ("requests", () if options.requests is None else (options.requests,)),
    ):
        for value in values:
            if value <= 0:
                raise ValueError(f"--{name} must be more than 0, got {value}")
