"""What a load sends: prompts and lengths drawn from a seed, in words that a server was asked about.

Every server is given the same lengths in the same order. The words differ from round to round and
from server to server: a prompt that was sent before would be found in the prefix cache.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from qwen3_asgi.bench.serve_client import Endpoint, Work, run_load
from qwen3_asgi.bench.wire import Probe, Target

if TYPE_CHECKING:
    from collections.abc import Sequence

    from qwen3_asgi.bench.serve_wire import Answer

Api = Literal["completions", "chat"]
WORDS = (
    *("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world"),
    *("school", "state", "family", "student", "group", "country", "problem", "hand", "part"),
    *("place", "case", "week", "company", "system", "program", "question", "work", "number"),
    *("night", "point", "home", "water", "room", "mother", "area", "money", "story", "fact"),
    *("month", "lot", "right", "study", "book", "eye", "job", "word", "road", "door", "name"),
)
# Words of the two prompts that tell how many tokens a word has, and what the template adds.
FEW_WORDS, MANY_WORDS = 8, 72
# Fields that not every server knows: what is refused is left out, one after the other.
OPTIONAL = ("ignore_eos", "continuous_usage_stats", "stream_options")
REFUSALS = ("http 400", "http 422")


class Length(NamedTuple):
    """A number of tokens, drawn evenly from `low … high`."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: str) -> Length:
        """`"128"` or `"64-256"`.

        Raises:
            ValueError: something else.
        """
        low, dash, high = text.partition("-")
        if not low.isdecimal() or (dash and not high.isdecimal()):
            raise ValueError(f"a length is a number of tokens or LOW-HIGH, got {text!r}")
        found = cls(int(low), int(high) if dash else int(low))
        if not 0 < found.low <= found.high:
            raise ValueError(f"a length is at least 1, and LOW at most HIGH, got {text!r}")
        return found

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}-{self.high}"


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked for beside the prompt. `extra` goes into every body as it is.

    `model` None: of each server the first that it lists.
    """

    model: str | None = None
    api: Api = "completions"
    temperature: float = 0.0
    ignore_eos: bool = True
    extra: dict[str, Any] = field(default_factory=dict)
    api_key: str | None = None
    timeout: float = 600.0

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.api == "chat" else "/v1/completions"


def first_model(url: str) -> str:
    """The first model that the server lists.

    Raises:
        ValueError: it lists none.
    """
    probe = Probe(Target.parse(url))
    try:
        return str(json.loads(probe.get("/v1/models"))["data"][0]["id"])
    except (LookupError, TypeError, ValueError) as error:
        raise ValueError(f"{url} does not say which models it has, give --model: {error}") from None
    finally:
        probe.close()


class Server:
    """One server under load, and what it was found to accept.

    `place` is its number among those that are compared. Call `meet` first.

    Raises:
        ValueError: no model was named, and it lists none.
    """

    def __init__(self, url: str, target: Target, request: Request, place: int) -> None:
        self.url = url
        self.refused: list[str] = []
        self.reports_usage = False
        self.model = request.model or first_model(url)
        self._request = request
        self._place = place
        self.endpoint = Endpoint(target, request.path, request.api_key, request.timeout)

    def meet(self) -> tuple[float, float]:
        """Ask for two short answers; returns tokens per word and tokens that every prompt has.

        Raises:
            ValueError: it answers neither with nor without the optional fields.
        """
        few = self._ask(FEW_WORDS)
        while few.error in REFUSALS and len(self.refused) < len(OPTIONAL):
            self.refused.append(OPTIONAL[len(self.refused)])
            few = self._ask(FEW_WORDS)
        many = few if few.error else self._ask(MANY_WORDS)
        for answer in (few, many):
            if answer.error:
                raise ValueError(f"{self.url} gives no usable answer: {answer.detail}")
        self.reports_usage = many.reported
        if few.prompt_tokens is None or many.prompt_tokens is None:
            return 1.0, 0.0
        each = (many.prompt_tokens - few.prompt_tokens) / (MANY_WORDS - FEW_WORDS)
        if each <= 0:
            return 1.0, 0.0
        return each, few.prompt_tokens - FEW_WORDS * each

    def work(
        self, lengths: Sequence[tuple[int, int]], calibration: tuple[float, float], salt: object
    ) -> list[Work]:
        """A request for each pair of prompt and output tokens."""
        each, base = calibration
        rng = random.Random(f"{salt}/{self._place}")
        return [
            self._work(max(1, round((prompt - base) / each)), output, rng)
            for prompt, output in lengths
        ]

    def _ask(self, words: int) -> Answer:
        work = self._work(words, 2, random.Random(f"meet {words}/{self._place}"))
        return run_load(self.endpoint, [work])[0]

    def _work(self, words: int, max_tokens: int, rng: random.Random) -> Work:
        request = self._request
        prompt = " ".join(rng.choices(WORDS, k=words))
        options: dict[str, Any] = {"include_usage": True, "continuous_usage_stats": True}
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": max_tokens,
            "temperature": request.temperature,
            "stream": True,
            "stream_options": options,
        }
        if request.ignore_eos:
            body["ignore_eos"] = True
        for name in self.refused:
            body.pop(name, None)
            options.pop(name, None)
        if request.api == "chat":
            body["messages"] = [{"role": "user", "content": prompt}]
        else:
            body["prompt"] = prompt
        return Work({**body, **request.extra}, max_tokens)


def draw_lengths(count: int, prompt: Length, output: Length, salt: object) -> list[tuple[int, int]]:
    """Prompt and output tokens of so many requests."""
    rng = random.Random(f"lengths {salt}")
    return [(rng.randint(*prompt), rng.randint(*output)) for _ in range(count)]


def poisson(count: int, rate: float, salt: object) -> list[float]:
    """Moments of arrivals, `rate` a second on average, with exponential gaps; from 0 on."""
    rng = random.Random(f"arrivals {salt}")
    moments = [0.0]
    for _ in range(count - 1):
        moments.append(moments[-1] + rng.expovariate(rate))
    return moments
