"""Dialogues with tools: the call, the answer after its result, and no call when none fits."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from .chat import fact_turn, pick
from .copying import ECHO_FRAMES, echo_turn
from .sample import Dialogue, Json, assistant, system, user
from .smalltalk import small_talk
from .toolkit import KINDS, TAILS, Kind, Offer, fresh_tails, offer
from .turns import Turn, any_system, any_thinking, compose
from .words import phrase

if TYPE_CHECKING:
    from random import Random

Value = str | int

_SKY = ("sunny", "rainy", "cloudy", "windy", "snowy", "foggy", "clear", "stormy")
_OPENINGS = ("", "", "", "", "Please help. ", "Hi! ", "Hello! ", "Question: ")
NO_TOOL = "I can not look that up."


def offers_for(
    rng: Random, kind: Kind, *, fits: bool, tails: tuple[str, ...] = TAILS
) -> list[Offer]:
    """One to three tools, with or without the wanted kind, in any order."""
    others = rng.sample([k for k in KINDS if k is not kind], rng.choice((0, 0, 1, 1, 2)))
    kinds = [*others, kind] if fits else others or [rng.choice([k for k in KINDS if k is not kind])]
    rng.shuffle(kinds)
    return [offer(rng, k, tails) for k in kinds]


def call_message(offered: Offer, calls: list[list[Value]], thought: str) -> Json:
    message = assistant("", thought)
    message["tool_calls"] = [
        {
            "type": "function",
            "function": {
                "name": offered.name,
                "arguments": dict(zip(offered.arguments, values, strict=True)),
            },
        }
        for values in calls
    ]
    return message


def calling(rng: Random, tails: tuple[str, ...] = TAILS) -> Dialogue:
    """The call itself, sometimes two at once, sometimes after other talk."""
    kind = rng.choice((*KINDS, *KINDS[:4]))
    offered = offers_for(rng, kind, fits=True, tails=tails)
    tool = next(o for o in offered if o.kind is kind)
    calls = [[slot.draw(rng) for slot in kind.slots]]
    ask = rng.choice(kind.asks).format(*calls[0])
    if kind.topic in ("weather", "time") and rng.random() < 0.1:
        calls.append([slot.draw(rng) for slot in kind.slots])
        ask = ask.replace(str(calls[0][0]), f"{calls[0][0]} and {calls[1][0]}")
    thinking = any_thinking(rng)
    thought = f"The user needs the {kind.topic}. I call {tool.name}." if thinking else ""
    messages: list[Json] = _lead(rng)
    messages += [user(rng.choice(_OPENINGS) + ask), call_message(tool, calls, thought)]
    return Dialogue(tuple(messages), tuple(o.schema for o in offered), thinking)


def _lead(rng: Random) -> list[Json]:
    instruction = any_system(rng)
    messages = [system(instruction)] if instruction else []
    if rng.random() < 0.15:
        turn = small_talk(rng) if rng.random() < 0.5 else fact_turn(rng, *pick(rng))
        messages += [user(turn.ask), assistant(turn.answer)]
    return messages


def _result(rng: Random, kind: Kind, values: list[Value]) -> tuple[str, str]:
    """What the tool returns, and what the model says about it."""
    first = values[0]
    if kind.topic == "weather":
        sky, heat = rng.choice(_SKY), rng.randint(-10, 38)
        key = rng.choice(("temperature", "temp", "degrees", "temperature_c"))
        sky_key = rng.choice(("condition", "sky", "weather", "conditions"))
        pair: Json = {key: heat, sky_key: sky}
        if rng.random() < 0.5:
            pair = {sky_key: sky, key: heat}
        if rng.random() < 0.3:
            pair = {"city": first, **pair}
        text = rng.choice((json.dumps(pair), json.dumps(pair), f"{sky}, {heat} degrees",
                           f"{heat} degrees and {sky}", f"{sky}, {heat} C"))  # fmt: skip
        return text, f"It is {heat} degrees and {sky} in {first}."
    if kind.topic == "time":
        clock = f"{rng.randrange(24):02d}:{rng.randrange(60):02d}"
        text = rng.choice((clock, json.dumps({rng.choice(("time", "now")): clock})))
        return text, f"It is {clock} in {first}."
    if kind.topic == "calculator":
        number = str(rng.randrange(10 ** rng.randint(1, 5)))
        text = rng.choice((number, f'{{"result": {number}}}', f'{{"value": {number}}}'))
        return text, f"{first} = {number}"
    if kind.topic == "search":
        found = phrase(rng, 7)
        text = rng.choice((found, json.dumps({"result": found}, ensure_ascii=False)))
        return text, f"I found this: {found}"
    done = "I have sent the message." if kind.topic == "message" else "The timer is set."
    return rng.choice(("ok", "done", '{"ok": true}', '{"status": "ok"}', "OK")), done


def answering(rng: Random, tails: tuple[str, ...] = TAILS) -> Dialogue:
    """The sentence after the tool's result."""
    kind = rng.choice((*KINDS, *KINDS[:4]))
    offered = offers_for(rng, kind, fits=True, tails=tails)
    tool = next(o for o in offered if o.kind is kind)
    values = [slot.draw(rng) for slot in kind.slots]
    thinking = any_thinking(rng)
    kept = thinking and rng.random() < 0.5
    text, answer = _result(rng, kind, values)
    messages: list[Json] = _lead(rng)
    messages += [
        user(rng.choice(_OPENINGS) + rng.choice(kind.asks).format(*values)),
        call_message(
            tool, [values], f"The user needs the {kind.topic}. I call {tool.name}." if kept else ""
        ),
        {"role": "tool", "content": text},
        assistant(answer, "The tool has answered. I tell the user." if thinking else ""),
    ]
    return Dialogue(tuple(messages), tuple(o.schema for o in offered), thinking)


def calling_anew(rng: Random) -> Dialogue:
    """A call of a tool whose name was never offered before."""
    return calling(rng, fresh_tails(rng))


def answering_anew(rng: Random) -> Dialogue:
    return answering(rng, fresh_tails(rng))


def ignoring(rng: Random) -> Dialogue:
    """Tools are offered but the question needs none of them, or needs one that is missing."""
    kind = rng.choice(KINDS[:2])
    offered = tuple(o.schema for o in offers_for(rng, kind, fits=False))
    draw = rng.random()
    if draw < 0.25:
        turn = _helpless(rng, kind)
    elif draw < 0.45:
        turn = small_talk(rng)
    elif draw < 0.6:
        turn = echo_turn(phrase(rng, 5), rng.choice(ECHO_FRAMES))
    else:
        relation, row = pick(rng)
        while relation.name == "arithmetic":
            relation, row = pick(rng)
        turn = fact_turn(rng, relation, row)
    return compose([turn], thinking=any_thinking(rng), instruction=any_system(rng), tools=offered)


def without_tools(rng: Random) -> Dialogue:
    """The weather or the time is asked for, and nothing is offered to find it."""
    turn = _helpless(rng, rng.choice(KINDS[:2]))
    return compose([turn], thinking=any_thinking(rng), instruction=any_system(rng))


def _helpless(rng: Random, kind: Kind) -> Turn:
    ask = rng.choice(kind.asks).format(*(slot.draw(rng) for slot in kind.slots))
    return Turn(ask, NO_TOOL, f"I have no tool for the {kind.topic}.")
