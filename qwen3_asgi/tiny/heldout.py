"""Questions that training never shows, each with a check of the answer.

The trainer scores itself with them; a test can send the same items through the HTTP endpoint.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import chain
from random import Random
from typing import TYPE_CHECKING, Literal, NamedTuple

from .chat import UNSEEN_BRIEF, full_answer
from .copying import MEMORIES, UNSEEN_ECHO_FRAMES
from .counting import UNSEEN_DOWN, UNSEEN_UP, is_unseen, numbers
from .facts import RELATIONS, Relation
from .phrasing import UNSEEN_FOLLOW_UPS, follow_up, unseen_question
from .sample import Json, assistant, system, user
from .toolkit import KINDS, UNSEEN_TAILS, Kind, Offer, offer
from .turns import UNSEEN_ONE_WORD_SYSTEMS
from .words import UNSEEN_CITIES, UNSEEN_NAMES, UNSEEN_WORDS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from .facts.relation import Row

_SEED = 71
_PER_RELATION = 4


class ToolCall(NamedTuple):
    name: str
    arguments: Json


@dataclass(frozen=True, slots=True)
class Item:
    """One request. `rule` says how the answer is judged against `expected` and `call`."""

    category: str
    messages: tuple[Json, ...]
    expected: str
    rule: Literal["word", "exact", "numbers", "call"] = "word"
    competing: tuple[str, ...] = ()
    tools: tuple[Json, ...] = ()
    enable_thinking: bool = False
    call: ToolCall | None = None

    @property
    def held_out_texts(self) -> tuple[str, ...]:
        """Every user message; none of them occurs in the training text."""
        return tuple(str(m["content"]) for m in self.messages if m["role"] == "user")

    def check(self, answer_text: str, tool_calls: Sequence[tuple[str, Json]] = ()) -> bool:
        """`answer_text` comes without reasoning; `tool_calls` are names with parsed arguments."""
        if self.rule == "call":
            return [tuple(call) for call in tool_calls] == [self.call]
        if tool_calls:
            return False
        if self.rule == "exact":
            return answer_text.strip() == self.expected
        if self.rule == "numbers":
            return re.findall(r"\d+", answer_text) == re.findall(r"\d+", self.expected)
        return _has(answer_text, self.expected) and not any(
            _has(answer_text, other) for other in self.competing
        )


def _has(text: str, phrase: str) -> bool:
    """As whole words; one or two letters must match in case, they are symbols."""
    flags = 0 if len(phrase) <= 2 else re.IGNORECASE
    return re.search(rf"(?<!\w){re.escape(phrase)}(?!\w)", text, flags) is not None


def _competing(relation: Relation, row: Row) -> tuple[str, ...]:
    allowed = full_answer(relation, row)
    answers = sorted({answer for _, answer in relation.rows})
    return tuple(answer for answer in answers if not _has(allowed, answer))


def _fact(
    relation: Relation,
    row: Row,
    category: str,
    messages: tuple[Json, ...],
    *,
    enable_thinking: bool = False,
    tools: tuple[Json, ...] = (),
) -> Item:
    return Item(
        category,
        messages,
        expected=row[1],
        competing=_competing(relation, row),
        tools=tools,
        enable_thinking=enable_thinking,
    )


def _facts(rng: Random) -> Iterator[Item]:
    for relation in RELATIONS:
        for n, row in enumerate(rng.sample(relation.rows, min(_PER_RELATION, len(relation.rows)))):
            messages = (user(unseen_question(rng, relation, row)),)
            thinking = n == _PER_RELATION - 1
            category = "facts, thinking" if thinking else "facts"
            yield _fact(relation, row, category, messages, enable_thinking=thinking)


def _brief(rng: Random) -> Iterator[Item]:
    for n in range(20):
        relation = rng.choice(RELATIONS)
        row = rng.choice(relation.rows)
        ask = unseen_question(rng, relation, row)
        messages: tuple[Json, ...]
        if n % 2:
            messages = (system(rng.choice(UNSEEN_ONE_WORD_SYSTEMS)), user(ask))
        else:
            messages = (user(rng.choice(UNSEEN_BRIEF).format(q=ask)),)
        yield _fact(relation, row, "one word", messages)


def _follow_ups(rng: Random) -> Iterator[Item]:
    chained = [relation for relation in RELATIONS if relation.follow_up]
    for _ in range(24):
        relation = rng.choice(chained)
        first, second = rng.sample(relation.rows, 2)
        messages = (
            user(unseen_question(rng, relation, first)),
            assistant(full_answer(relation, first)),
            user(follow_up(rng, relation, second, UNSEEN_FOLLOW_UPS)),
        )
        yield _fact(relation, second, "follow-up", messages)


def _recalls(rng: Random) -> Iterator[Item]:
    pools = (UNSEEN_NAMES, UNSEEN_CITIES, UNSEEN_NAMES, UNSEEN_WORDS)
    for n in range(24):
        memory, pool = MEMORIES[n % 4], pools[n % 4]
        value, other = rng.sample(pool, 2)
        messages = (
            user(rng.choice(memory.told).format(v=value)),
            assistant(memory.reply.format(v=value)),
            user(rng.choice(memory.unseen)),
        )
        yield Item("recall", messages, value, competing=(other,), enable_thinking=n % 3 == 2)


def _echoes(rng: Random) -> Iterator[Item]:
    for n in range(30):
        text = " ".join(rng.sample(UNSEEN_WORDS, rng.randint(1, 5)))
        ask = rng.choice(UNSEEN_ECHO_FRAMES).format(t=text)
        yield Item("echo", (user(ask),), text, "exact", enable_thinking=n % 5 == 4)


def _counts(rng: Random) -> Iterator[Item]:
    found = 0
    while found < 20:
        a, b = rng.randint(2, 60), rng.randint(2, 60)
        if not is_unseen(a, b) or abs(a - b) < 2:
            continue
        found += 1
        ask = rng.choice(UNSEEN_UP if a < b else UNSEEN_DOWN).format(a=a, b=b)
        yield Item("counting", (user(ask),), numbers(a, b), "numbers")


def _value(rng: Random, kind: Kind, position: int) -> str | int:
    if kind.topic in ("weather", "time"):
        return rng.choice(UNSEEN_CITIES)
    if kind.topic == "calculator":
        return f"{rng.randrange(10, 1000)} {rng.choice('+-*/')} {rng.randrange(10, 1000)}"
    if kind.topic == "timer":
        return rng.randint(1, 90)
    if kind.topic == "message" and position == 0:
        return rng.choice(UNSEEN_NAMES)
    return " ".join(rng.sample(UNSEEN_WORDS, rng.randint(1, 3)))


def _offers(rng: Random, wanted: Kind) -> list[Offer]:
    others = rng.sample([kind for kind in KINDS if kind is not wanted], rng.choice((0, 1, 2)))
    kinds = [*others, wanted]
    rng.shuffle(kinds)
    return [offer(rng, kind, UNSEEN_TAILS) for kind in kinds]


def _calls(rng: Random) -> Iterator[Item]:
    for n in range(42):
        kind = KINDS[n % len(KINDS)]
        offers = _offers(rng, kind)
        tool = next(o for o in offers if o.kind is kind)
        values = [_value(rng, kind, position) for position in range(len(kind.slots))]
        yield Item(
            "tool call, thinking" if n % 3 == 2 else "tool call",
            (user(rng.choice(kind.unseen).format(*values)),),
            "",
            "call",
            tools=tuple(o.schema for o in offers),
            enable_thinking=n % 3 == 2,
            call=ToolCall(tool.name, dict(zip(tool.arguments, values, strict=True))),
        )


def _tool_answers(rng: Random) -> Iterator[Item]:
    weather = KINDS[0]
    for n in range(16):
        tool = offer(rng, weather, UNSEEN_TAILS)
        place, heat = rng.choice(UNSEEN_CITIES), rng.randint(-10, 38)
        call: Json = {"name": tool.name, "arguments": {tool.arguments[0]: place}}
        messages: tuple[Json, ...] = (
            user(rng.choice(weather.unseen).format(place)),
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"type": "function", "function": call}],
            },
            {"role": "tool", "content": f'{{"temperature": {heat}, "condition": "sunny"}}'},
        )
        yield Item(
            "tool answer", messages, str(heat), tools=(tool.schema,), enable_thinking=n % 4 == 3
        )


def _unneeded(rng: Random) -> Iterator[Item]:
    for n in range(20):
        relation = rng.choice([r for r in RELATIONS if r.name != "arithmetic"])
        row = rng.choice(relation.rows)
        offers = _offers(rng, KINDS[n % len(KINDS)])
        yield _fact(
            relation,
            row,
            "tool not needed",
            (user(unseen_question(rng, relation, row)),),
            tools=tuple(o.schema for o in offers),
        )


def heldout_items() -> list[Item]:
    """All items, always the same and in the same order; none twice."""
    rng = Random(_SEED)
    parts = (
        _facts, _brief, _follow_ups, _recalls, _echoes, _counts, _calls, _tool_answers, _unneeded,
    )  # fmt: skip
    items: list[Item] = []
    for item in chain.from_iterable(part(rng) for part in parts):
        if item not in items:
            items.append(item)
    return items
