"""The same hang-ups for several servers, seen from outside: what does each do for nobody?

Nothing is asked of a server but completions, so it may be anybody's. Its CPU time says how long it
works on after the hang-up; a short request, timed alone beforehand and then sent right after the
hang-up, says who waits for that. Servers take turns, first to last and then last to first.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections import deque
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from qwen3_asgi.bench.crowd import Crowd
from qwen3_asgi.bench.figures import columns
from qwen3_asgi.bench.processes import cpu_seconds, listener_pid
from qwen3_asgi.bench.serve_work import REFUSALS, WORDS, first_model
from qwen3_asgi.bench.wire import Target

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

Kind = Literal["plain", "stream"]
# Words and tokens of the short request.
SHORT_WORDS, SHORT_TOKENS = 8, 4
ANSWER_SECONDS = 900.0
# A server is idle when it has used so little CPU time for so long.
QUIET_SECONDS, QUIET_CPU_SECONDS = 1.0, 0.05
LOOK_SECONDS = 0.05
IDLE_LIMIT_SECONDS = 900.0


@dataclass(frozen=True, slots=True)
class PeerStormOptions:
    """`kinds` of clients, each in storms of its own: those that stream, and those that don't.

    They hang up `hang_up_after` seconds after the last of them has sent its request.
    """

    clients: int = 8
    kinds: tuple[Kind, ...] = ("plain", "stream")
    prompt_words: int = 150
    max_tokens: int = 200
    hang_up_after: float = 1.0
    repeat: int = 3


@dataclass(frozen=True, slots=True)
class PeerRound:
    """Seconds. `lone` and `follow_up` are of a whole short answer, without and after a storm.

    `lone_cpu` is the CPU time that the lone one cost, `cpu_after` what was used from the hang-up
    until the server was idle, the follow-up included; `idle_after` is when that was.
    """

    lone: float
    follow_up: float
    lone_cpu: float
    cpu_after: float
    idle_after: float

    @property
    def wasted_cpu(self) -> float:
        """CPU time after the hang-up that was not for the follow-up."""
        return max(0.0, self.cpu_after - self.lone_cpu)


@dataclass(frozen=True, slots=True)
class PeerRow:
    """All storms of one kind on one server."""

    server: str
    pid: int
    model: str
    kind: Kind
    rounds: tuple[PeerRound, ...]

    def median(self, name: str) -> float:
        return float(statistics.median(getattr(each, name) for each in self.rounds))

    @property
    def ratio(self) -> float:
        """The follow-up's time by a lone request's."""
        return round(self.median("follow_up") / self.median("lone"), 3)

    def figures(self) -> dict[str, float]:
        names = ("lone", "follow_up", "lone_cpu", "cpu_after", "wasted_cpu", "idle_after")
        return {f"{name}_seconds": round(self.median(name), 3) for name in names} | {
            "follow_up_ratio": self.ratio
        }


@dataclass(frozen=True, slots=True)
class PeerStormReport:
    options: PeerStormOptions
    rows: tuple[PeerRow, ...]

    def to_json(self) -> str:
        rows = [{**asdict(row), **row.figures()} for row in self.rows]
        return json.dumps({"options": asdict(self.options), "rows": rows})


def table(report: PeerStormReport) -> str:
    """The report as lines for a person."""
    options = report.options
    rows = [
        [
            *("server", "clients", "alone s", "after s", "ratio", "CPU s alone", "CPU s after"),
            *("for nobody", "idle after s"),
        ]
    ]
    for row in report.rows:
        found = row.figures()
        rows.append(
            [
                row.server,
                f"{options.clients} {row.kind}",
                f"{found['lone_seconds']:.3f}",
                f"{found['follow_up_seconds']:.3f}",
                f"{row.ratio:.2f}",
                f"{found['lone_cpu_seconds']:.2f}",
                f"{found['cpu_after_seconds']:.2f}",
                f"{found['wasted_cpu_seconds']:.2f}",
                f"{found['idle_after_seconds']:.2f}",
            ]
        )
    note = (
        f"prompts of {options.prompt_words} words, {options.max_tokens} tokens; hung up after "
        f"{options.hang_up_after:g} s; medians of {options.repeat}; alone and after: a short "
        f"request of {SHORT_TOKENS} tokens, sent alone and right after the hang-up"
    )
    return f"{columns(rows)}\n{note}"


class Peer:
    """One server. `pid` is its process; None: the one that listens on the port.

    Raises:
        ValueError: nobody there, no usable answer, or no process that can be seen.
    """

    def __init__(self, url: str, pid: int | None) -> None:
        self.url = url
        self.target = Target.parse(url)
        self.model = first_model(url)
        self.pid = listener_pid(self.target.port) if pid is None else pid
        self._ignore_eos = True
        self.cpu()
        if self._ask("warm up")[0] in REFUSALS:
            self._ignore_eos = False
        self.answer("warm up again")

    def cpu(self) -> float:
        return cpu_seconds(self.pid)

    def body(self, prompt: str, max_tokens: int, *, stream: bool) -> dict[str, Any]:
        more = {"ignore_eos": True} if self._ignore_eos else {}
        return {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": stream,
            **more,
        }

    def answer(self, salt: str) -> float:
        """Seconds until a short request has its whole answer.

        Raises:
            ValueError: it is refused.
        """
        begin = time.perf_counter()
        status, data = self._ask(salt)
        seconds = time.perf_counter() - begin
        if status != "http 200":
            raise ValueError(f"{self.url} gives no usable answer: {data[:300]!r}")
        return seconds

    def _ask(self, salt: str) -> tuple[str, bytes]:
        body = self.body(words(salt, SHORT_WORDS), SHORT_TOKENS, stream=False)
        with self.target.send("POST", "/v1/completions", body) as connection:
            connection.settimeout(ANSWER_SECONDS)
            data = b""
            while chunk := connection.recv(65536):
                data += chunk
        status = data.split(b" ", 2)[1:2]
        return f"http {status[0].decode('latin-1') if status else 'nothing'}", data

    def wait_idle(self) -> tuple[float, float]:
        """Wait until the server has been idle for a while; when that began, and its CPU then.

        Raises:
            ValueError: it never is.
        """
        looks = deque([(time.perf_counter(), self.cpu())])
        deadline = looks[0][0] + IDLE_LIMIT_SECONDS
        while looks[-1][0] < deadline:
            time.sleep(LOOK_SECONDS)
            looks.append((time.perf_counter(), self.cpu()))
            while looks[1][0] <= looks[-1][0] - QUIET_SECONDS:
                looks.popleft()
            (since, before), (now, used) = looks[0], looks[-1]
            if now - since >= QUIET_SECONDS and used - before <= QUIET_CPU_SECONDS:
                return since, used
        raise ValueError(f"{self.url} was not idle after {IDLE_LIMIT_SECONDS:.0f} s")


def words(salt: str, count: int) -> str:
    """A prompt that no prefix cache has."""
    return " ".join(random.Random(salt).choices(WORDS, k=count))


def run_peer_storm(peers: Sequence[Peer], options: PeerStormOptions) -> PeerStormReport:
    """Storms of every kind on every server, in turn.

    Raises:
        ValueError: nothing to do, or clients that are answered before they hang up.
    """
    _check(options)
    rows = []
    for kind in options.kinds:
        rounds: list[list[PeerRound]] = [[] for _ in peers]
        for number in range(options.repeat):
            order = range(len(peers))
            for place in order if number % 2 == 0 else reversed(order):
                rounds[place].append(_round(peers[place], options, kind, f"{kind}{number}"))
        rows += [
            PeerRow(peer.url, peer.pid, peer.model, kind, tuple(done))
            for peer, done in zip(peers, rounds, strict=True)
        ]
    return PeerStormReport(options, tuple(rows))


def _round(peer: Peer, options: PeerStormOptions, kind: Kind, salt: str) -> PeerRound:
    _, cpu = peer.wait_idle()
    lone = peer.answer(f"lone {salt}")
    _, after_lone = peer.wait_idle()

    def bodies() -> Iterator[dict[str, Any]]:
        for client in range(options.clients):
            prompt = words(f"{salt} client {client}", options.prompt_words)
            yield peer.body(prompt, options.max_tokens, stream=kind == "stream")

    with closing(Crowd(peer.target, bodies())) as crowd:
        deadline = time.perf_counter() + options.hang_up_after
        while not crowd.answered and (left := deadline - time.perf_counter()) > 0:
            crowd.read(left)
        if crowd.answered:
            raise ValueError(
                f"{peer.url} answered {crowd.answered} clients before they hung up: raise "
                "--max-tokens or --prompt-words, or lower --hang-up-after"
            )
        cpu_before, hung_up = peer.cpu(), time.perf_counter()
    follow_up = peer.answer(f"follow-up {salt}")
    idle, cpu_idle = peer.wait_idle()
    return PeerRound(
        lone=round(lone, 4),
        follow_up=round(follow_up, 4),
        lone_cpu=round(after_lone - cpu, 3),
        cpu_after=round(cpu_idle - cpu_before, 3),
        idle_after=round(idle - hung_up, 3),
    )


def _check(options: PeerStormOptions) -> None:
    for name in ("clients", "prompt_words", "max_tokens", "hang_up_after", "repeat"):
        value = getattr(options, name)
        if value <= 0:
            raise ValueError(f"--{name.replace('_', '-')} must be more than 0, got {value:g}")
