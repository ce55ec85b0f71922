"""The kinds of tools that the model learns to call, and how a request for each is worded.

Names, descriptions and argument names vary, so that the model has to copy them from the offer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from .facts.relation import capitalised
from .words import COMMON, city, invented, name, phrase

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

    from .sample import Json


def _expression(rng: Random) -> str:
    numbers = [str(rng.randrange(10 ** rng.choice((1, 2, 2, 3)))) for _ in range(2)]
    return f" {rng.choice('+-*/')} ".join(numbers)


def _words(rng: Random) -> str:
    return phrase(rng, 4).rstrip(".!?")


def _minutes(rng: Random) -> int:
    return rng.randint(1, 90)


class Slot(NamedTuple):
    """One argument: the names it may have, its JSON type and how a value is drawn."""

    names: tuple[str, ...]
    kind: str
    draw: Callable[[Random], str | int]


class Kind(NamedTuple):
    """One kind of tool; `asks` and `unseen` name its values `{0}` and `{1}`."""

    topic: str
    verbs: tuple[str, ...]
    nouns: tuple[str, ...]
    descriptions: tuple[str, ...]
    slots: tuple[Slot, ...]
    asks: tuple[str, ...]
    unseen: tuple[str, ...]


class Offer(NamedTuple):
    """A tool as one request offers it."""

    kind: Kind
    name: str
    arguments: tuple[str, ...]
    schema: Json


_PLACE = Slot(("city", "location", "place", "town", "city_name", "where"), "string", city)
_GET = ("get", "fetch", "find", "look_up", "show", "read", "check", "query", "current", "tell")

KINDS = (
    Kind(
        "weather", _GET, ("weather", "forecast", "city_weather", "weather_report"),
        ("Get the weather in a city.", "The current weather of a place.", "Get the current weather",
         "Returns the weather.", "Weather for a city"),
        (_PLACE,),
        ("What is the weather in {0}?", "What's the weather in {0}?", "How is the weather in {0}?",
         "Tell me the weather in {0}.", "What is the weather like in {0}?", "Is it raining in {0}?",
         "Weather in {0}?", "How is the weather in {0} today?", "Is it warm in {0}?",
         "What is the weather in {0} today?", "Check the weather in {0}.",
         "Do I need a coat in {0}?"),
        ("What's the weather like in {0}?", "Can you tell me the weather in {0}?",
         "How is the weather today in {0}?", "Please check the weather in {0}."),
    ),
    Kind(
        "time", _GET, ("time", "local_time", "clock", "time_now"),
        ("Get the time in a city.", "The local time of a place.", "Returns the current time.",
         "Current time for a city"),
        (_PLACE,),
        ("What time is it in {0}?", "What is the time in {0}?", "Tell me the time in {0}.",
         "What's the time in {0}?", "How late is it in {0}?", "Time in {0}?",
         "What time is it now in {0}?", "Check the time in {0}."),
        ("Can you tell me the time in {0}?", "What time is it in {0} now?",
         "Please check the time in {0}."),
    ),
    Kind(
        "calculator", ("run", "use", "do", "simple", "my"),
        ("calculator", "calculate", "calc", "math", "compute"),
        ("Compute an expression.", "A calculator.", "Evaluates an expression",
         "Calculate a result."),
        (Slot(("expression", "formula", "input", "calculation"), "string", _expression),),
        ("What is {0}?", "Calculate {0}.", "Compute {0}.", "How much is {0}?", "{0} = ?",
         "What is the result of {0}?", "Use the calculator for {0}.", "Please calculate {0}.",
         "Work out {0}."),
        ("Can you calculate {0}?", "Please compute {0}.", "Tell me how much {0} is."),
    ),
    Kind(
        "search", ("web", "do", "run", "find", "google"),
        ("search", "lookup", "web_search", "query"),
        ("Search the web.", "Find pages about something.", "Web search", "Searches the internet."),
        (Slot(("query", "q", "text", "question", "terms"), "string", _words),),
        ("Search for {0}.", "Search the web for {0}.", "Find pages about {0}.", "Look up {0}.",
         "Please search for {0}.", "Find {0} on the web.", "Can you look up {0}?",
         "Search: {0}"),
        ("Please search the web for {0}.", "Can you search for {0}?", "Please look up {0}."),
    ),
    Kind(
        "message", ("send", "write", "post"), ("message", "mail", "note", "text_message"),
        ("Send a message to a person.", "Send a message.", "Writes a message to somebody."),
        (Slot(("recipient", "to", "person", "name"), "string", name),
         Slot(("text", "message", "body", "content"), "string", _words)),
        ("Send a message to {0}: {1}", "Tell {0}: {1}", "Write to {0}: {1}",
         "Please send {0} this message: {1}", "Message {0}: {1}"),
        ("Please send a message to {0}: {1}", "Please write to {0}: {1}"),
    ),
    Kind(
        "timer", ("set", "start", "new"), ("timer", "alarm", "countdown"),
        ("Start a timer.", "Set a timer for some minutes.", "A kitchen timer"),
        (Slot(("minutes", "duration", "min", "time"), "integer", _minutes),),
        ("Set a timer for {0} minutes.", "Start a timer of {0} minutes.", "Timer for {0} minutes.",
         "Please set a timer for {0} minutes.", "Wake me in {0} minutes."),
        ("Please start a timer of {0} minutes.", "Can you set a timer for {0} minutes?"),
    ),
)  # fmt: skip

TAILS = ("", "", "", "", "_v2", "_tool", "_api", "_now", "_1", "_service")
UNSEEN_TAILS = ("_plus", "_for_me")
_NAME_WORDS = tuple(text.lower() for text in COMMON if text.isascii())


def fresh_tails(rng: Random) -> tuple[str, ...]:
    """Endings made of any words, so that a name can't be known by heart."""
    return tuple(
        "".join(
            f"_{rng.choice(_NAME_WORDS) if rng.random() < 0.5 else invented(rng)}"
            for _ in range(size)
        )
        for size in (1, 1, 2)
    )


def tool_name(rng: Random, kind: Kind, tails: tuple[str, ...] = TAILS) -> str:
    """snake_case mostly; sometimes camelCase or the bare noun."""
    noun = rng.choice(kind.nouns)
    full = noun if rng.random() < 0.25 else f"{rng.choice(kind.verbs)}_{noun}"
    full += rng.choice(tails)
    if tails is TAILS and rng.random() < 0.12:
        head, *rest = full.split("_")
        return head + "".join(capitalised(part) for part in rest)
    return full


def offer(rng: Random, kind: Kind, tails: tuple[str, ...] = TAILS) -> Offer:
    """Wraps one tool in a schema as clients write it, with keys present or absent."""
    name_ = tool_name(rng, kind, tails)
    arguments = tuple(rng.choice(slot.names) for slot in kind.slots)
    properties: Json = {}
    for argument, slot in zip(arguments, kind.slots, strict=True):
        properties[argument] = {"type": slot.kind}
        if rng.random() < 0.15:
            properties[argument] = {"type": slot.kind, "description": f"The {argument}"}
    parameters: Json = {"type": "object", "properties": properties}
    if rng.random() < 0.75:
        parameters["required"] = list(arguments)
    function: Json = {"name": name_}
    if rng.random() < 0.8:
        function["description"] = rng.choice(kind.descriptions)
    function["parameters"] = parameters
    return Offer(kind, name_, arguments, {"type": "function", "function": function})
