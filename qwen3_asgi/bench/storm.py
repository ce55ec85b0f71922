"""The disconnect storm: N clients with long prompts hang up; what does the server do then?

All at once, or at random moments of a window. Reads `/load` and `/metrics` of the server, so its
numbers are the server's own: scheduler steps and milliseconds from the last hang-up to 0/0, and
tokens computed for gone clients. And the TTFT of short requests: a lone one, one sent at the last
hang-up, which finds a step in flight, and one sent as soon as the server says 0/0.

A round is a lone request, a storm timed to 0/0 with a request after it, and a storm with a request
at its end. Rounds are repeated, so that these requests take turns and what slows the machine down
slows all of them.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from prometheus_client.parser import text_string_to_metric_families

from qwen3_asgi.bench.crowd import Crowd
from qwen3_asgi.bench.figures import pairs
from qwen3_asgi.bench.wire import Probe, Target

if TYPE_CHECKING:
    from collections.abc import Iterator

WAIT_SECONDS = 120.0
POLL_SECONDS = 0.001
# After 0/0 the server still closes its side of the sockets; a lone request must not wait for that.
SETTLE_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class StormOptions:
    """`kind`: clients stream, don't ("plain"), or half and half ("both").

    `random_hang_up`: the seconds over which the hang-ups are spread, beginning when every request
    is live; None: all at once then.
    """

    model: str = "tiny"
    clients: int = 8
    kind: str = "both"
    prompt_words: int = 300
    max_tokens: int = 256
    random_hang_up: float | None = None
    seed: int = 0
    repeat: int = 5


@dataclass(frozen=True, slots=True)
class StormRound:
    """Times in milliseconds. `running_before` and `waiting_before` are of the first hang-up;
    `steps_to_idle` and `iterations_to_idle` are counted from a look at `/load` just before the last
    one. `answered` clients got the end of their answer before they could hang up."""

    running_before: int
    waiting_before: int
    idle_ms: float
    steps_to_idle: int
    iterations_to_idle: int
    wasted_tokens: int
    kv_used_blocks_after: int
    answered: int
    lone_ttft_ms: float
    follow_up_ttft_ms: float
    after_idle_ttft_ms: float


@dataclass(frozen=True, slots=True)
class StormReport:
    """All rounds, and their medians."""

    options: StormOptions
    rounds: tuple[StormRound, ...]

    def median(self, name: str) -> Any:
        return statistics.median_high(getattr(each, name) for each in self.rounds)

    def most(self, name: str) -> Any:
        return max(getattr(each, name) for each in self.rounds)

    @property
    def follow_up_ratio(self) -> float:
        return self._ratio("follow_up_ttft_ms")

    @property
    def after_idle_ratio(self) -> float:
        return self._ratio("after_idle_ttft_ms")

    def _ratio(self, name: str) -> float:
        return float(round(self.median(name) / self.median("lone_ttft_ms"), 2))

    def to_json(self) -> str:
        """Medians under the names of a round's fields; `kv_used_blocks_after` is the most."""
        rounds = [asdict(each) for each in self.rounds]
        return json.dumps(
            {
                **asdict(self.options),
                **{name: self.median(name) for name in rounds[0]},
                "kv_used_blocks_after": self.most("kv_used_blocks_after"),
                "follow_up_ratio": self.follow_up_ratio,
                "after_idle_ratio": self.after_idle_ratio,
                "rounds": rounds,
            }
        )


def table(report: StormReport) -> str:
    """The report as lines for a person."""
    options, median, most = report.options, report.median, report.most
    spread = options.random_hang_up
    how = "at once" if spread is None else f"over {spread:g} s, seed {options.seed}"
    rows = [
        ("clients", f"{options.clients} ({options.kind}), hanging up {how}"),
        ("storms", f"twice {options.repeat}; medians (and the most) of them"),
        ("running/waiting before", f"{median('running_before')}/{median('waiting_before')}"),
        ("last hang-up to 0/0", f"{median('idle_ms'):.1f} ms ({most('idle_ms'):.1f})"),
        ("forward passes until 0/0", f"{median('steps_to_idle')} ({most('steps_to_idle')})"),
        (
            "scheduler iterations until 0/0",
            f"{median('iterations_to_idle')} ({most('iterations_to_idle')})",
        ),
        (
            "tokens computed for gone clients",
            f"{median('wasted_tokens')} ({most('wasted_tokens')})",
        ),
        ("KV blocks in use after", f"{most('kv_used_blocks_after')}"),
        ("clients answered before they left", f"{median('answered')} ({most('answered')})"),
        ("TTFT, lone request", f"{median('lone_ttft_ms'):.1f} ms"),
        (
            "TTFT, sent at the last hang-up",
            f"{median('follow_up_ttft_ms'):.1f} ms, {report.follow_up_ratio:.2f} of a lone one's",
        ),
        (
            "TTFT, sent at 0/0",
            f"{median('after_idle_ttft_ms'):.1f} ms, {report.after_idle_ratio:.2f} of a lone one's",
        ),
    ]
    return pairs(rows)


def run_storm(url: str, options: StormOptions) -> StormReport:
    """Storms against a running server.

    Raises:
        ValueError: the server has no `/load`, or never got busy or idle; or no client or round.
    """
    if options.clients < 1 or options.repeat < 1:
        raise ValueError("at least one client and one round are needed")
    target = Target.parse(url)
    with closing(Probe(target)) as probe:
        storms = _Storms(target, probe, options)
        _ttft(target, options, "warm up")
        return StormReport(options, tuple(storms.round(i) for i in range(options.repeat)))


class _Storms:
    def __init__(self, target: Target, probe: Probe, options: StormOptions) -> None:
        self._target = target
        self._probe = probe
        self._options = options
        self._rng = random.Random(options.seed)

    def round(self, number: int) -> StormRound:
        time.sleep(SETTLE_SECONDS)
        lone = _ttft(self._target, self._options, f"lone {number}")
        wasted_before = self._wasted()
        first, last, hung_up, answered = self._storm(f"first{number}")
        after = self._wait_idle()
        idle = time.perf_counter()
        after_idle = _ttft(self._target, self._options, f"after {number}")
        wasted = self._wasted() - wasted_before
        self._storm(f"second{number}")
        follow_up = _ttft(self._target, self._options, f"follow-up {number}")
        self._wait_idle()
        return StormRound(
            running_before=first["num_running"],
            waiting_before=first["num_waiting"],
            idle_ms=round((idle - hung_up) * 1000, 3),
            steps_to_idle=after["step"] - last["step"],
            iterations_to_idle=after["iteration"] - last["iteration"],
            wasted_tokens=wasted,
            kv_used_blocks_after=after["kv_used_blocks"],
            answered=answered,
            lone_ttft_ms=round(lone * 1000, 3),
            follow_up_ttft_ms=round(follow_up * 1000, 3),
            after_idle_ttft_ms=round(after_idle * 1000, 3),
        )

    def _storm(self, salt: str) -> tuple[dict[str, Any], dict[str, Any], float, int]:
        """The loads before the first and the last hang-up, its moment, how many were answered."""
        with closing(Crowd(self._target, self._bodies(salt))) as crowd:
            first = last = self._wait_busy(crowd)
            spread = self._options.random_hang_up
            if spread is not None:
                begin = time.perf_counter()
                moments = sorted(begin + self._rng.uniform(0, spread) for _ in range(len(crowd)))
                crowd.shuffle(self._rng)
                crowd.hang_up_at(moments[:-1])
                crowd.read_until(moments[-1] - POLL_SECONDS)
                last = self._probe.load()
                crowd.read_until(moments[-1])
            hung_up = time.perf_counter()
        return first, last, hung_up, crowd.answered

    def _bodies(self, salt: str) -> Iterator[dict[str, Any]]:
        options = self._options
        kinds = {"stream": [True], "plain": [False], "both": [True, False]}[options.kind]
        for index in range(options.clients):
            words = " ".join(f"{salt}{index}x{word % 97}" for word in range(options.prompt_words))
            yield _body(options, words, options.max_tokens, stream=kinds[index % len(kinds)])

    def _wait_busy(self, crowd: Crowd) -> dict[str, Any]:
        """The first load in which every client's request is live."""
        deadline = time.monotonic() + WAIT_SECONDS
        while time.monotonic() < deadline and not crowd.answered:
            load = self._probe.load()
            if load["num_running"] and load["num_running"] + load["num_waiting"] >= len(crowd):
                return load
            crowd.read(POLL_SECONDS)
        raise ValueError(
            "the clients were answered too fast, or refused: raise --max-tokens or --prompt-words"
        )

    def _wait_idle(self) -> dict[str, Any]:
        deadline = time.monotonic() + WAIT_SECONDS
        while time.monotonic() < deadline:
            load = self._probe.load()
            if not (load["num_running"] or load["num_waiting"]):
                return load
            time.sleep(POLL_SECONDS)
        raise ValueError(f"the server was not idle after {WAIT_SECONDS:.0f} s")

    def _wasted(self) -> int:
        text = self._probe.get("/metrics").decode()
        return int(
            sum(
                sample.value
                for family in text_string_to_metric_families(text)
                for sample in family.samples
                if sample.name == "qwen3_asgi_wasted_tokens_total"
            )
        )


def _body(options: StormOptions, prompt: str, max_tokens: int, *, stream: bool) -> dict[str, Any]:
    return {
        "model": options.model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": stream,
    }


def _ttft(target: Target, options: StormOptions, prompt: str) -> float:
    """Seconds to the first token of a short request."""
    begin = time.perf_counter()
    body = _body(options, prompt, 4, stream=True)
    with target.send("POST", "/v1/completions", body) as connection:
        data = b""
        while b"data: " not in data:
            chunk = connection.recv(65536)
            if not chunk:
                raise ValueError(f"no token came: {data[:300]!r}")
            data += chunk
        first = time.perf_counter() - begin
        while connection.recv(65536):
            pass
    return first
