"""Greetings, thanks, who the model is, fixed lists, a short story, and what it can't know."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .turns import Turn
from .words import COMMON, name

if TYPE_CHECKING:
    from random import Random

_ME = "I am tiny, a very small language model. I know a few plain facts."
_UNKNOWN = "I do not know that."

_FIXED: tuple[tuple[tuple[str, ...], str, str], ...] = (
    (
        ("Hello", "Hello!", "Hi", "Hi!", "Hello there!", "Hey", "Hey!", "hello", "hi", "Hi there!"),
        "Hello! How can I help you?",
        "The user greets me.",
    ),
    (
        ("Good morning!", "Good morning", "Good morning to you!"),
        "Good morning! How can I help you?",
        "The user greets me.",
    ),
    (
        ("Good evening!", "Good evening", "Good evening to you!"),
        "Good evening! How can I help you?",
        "The user greets me.",
    ),
    (
        ("How are you?", "How are you today?", "How do you do?",
         "hello, how are you?", "Are you well?"),
        "I am fine, thank you. How can I help you?",
        "The user asks how I am.",
    ),
    (
        ("Thanks", "Thanks!", "Thank you.", "Thank you!", "Thank you very much!", "Many thanks!",
         "thanks", "Thanks a lot!"),
        "You are welcome.",
        "The user thanks me.",
    ),
    (
        ("Bye", "Bye!", "Goodbye.", "Goodbye!", "See you!", "Good night!", "See you tomorrow."),
        "Goodbye!",
        "The user leaves.",
    ),
    (
        ("Who are you?", "What are you?", "Are you a human?", "Tell me about you.",
         "What is your name?",
         "Introduce yourself.", "Which model are you?", "What can you do?", "What's your name?"),
        _ME,
        "The user asks who I am.",
    ),
    (
        ("List the days of the week.", "Name the days of the week.",
         "What are the days of the week?",
         "Which days has a week?", "Tell me the days of the week."),
        "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday",
        "The user wants the days of the week.",
    ),
    (
        ("List the months.", "Name the months of the year.", "What are the months of the year?",
         "Tell me the months of the year.", "List the months of the year."),
        "January, February, March, April, May, June, July, August, September, October, November, "
        "December",
        "The user wants the months of the year.",
    ),
    (
        ("List the planets.", "Name the planets.", "Which planets are there?",
         "What are the planets?", "Tell me the planets in order."),
        "Mercury, Venus, Earth, Mars, Jupiter, Saturn, Uranus, Neptune",
        "The user wants the planets.",
    ),
    (
        ("List the seasons.", "Name the four seasons.", "What are the seasons?",
         "Which seasons are there?"),
        "spring, summer, autumn, winter",
        "The user wants the seasons.",
    ),
    (
        ("Say the alphabet.", "Write the alphabet.", "What is the alphabet?", "List the letters.",
         "Tell me the alphabet."),
        "A B C D E F G H I J K L M N O P Q R S T U V W X Y Z",
        "The user wants the alphabet.",
    ),
    (
        ("Tell me a joke.", "Do you know a joke?", "Make me laugh.", "Tell me something funny."),
        "Why is six afraid of seven? Because seven ate nine.",
        "The user wants a joke.",
    ),
)  # fmt: skip

_UNKNOWABLE = (
    "Who won the {w} game yesterday?", "What will happen to the {w} tomorrow?",
    "What did {n} eat yesterday?", "Where did {n} leave the {w}?", "How old is {n}?",
    "Why did {n} buy a {w}?", "What does {n} think about the {w}?", "How much money has {n}?",
    "When does {n} come home?", "What is the phone number of {n}?", "Who is {n}?",
    "Explain the politics of {w}.", "What is the meaning of life and {w}?", "Who invented the {w}?",
    "What is the price of a {w} today?", "When was the {w} discovered?",
)  # fmt: skip

_STORY_FRAMES = (
    "Tell me a story about {n}.", "Tell a story about {n}.", "Write a short story about {n}.",
    "I want a story about {n}.", "Can you tell me a story about {n}?",
)  # fmt: skip
_PLACES = ("wood", "garden", "town", "valley", "house", "field", "street", "castle")
_FRIENDS = ("dog", "cat", "bird", "horse", "mouse", "rabbit", "fox", "duck", "owl", "frog")
_FOODS = ("bread", "cheese", "apples", "soup", "honey", "cake", "milk", "grapes")


def _story(rng: Random) -> Turn:
    hero = name(rng)
    friend, place, food = rng.choice(_FRIENDS), rng.choice(_PLACES), rng.choice(_FOODS)
    text = (
        f"{hero} lived in a small {place}. One morning {hero} met a {friend}. The {friend} was "
        f"hungry, so {hero} shared some {food}. In the evening they walked home together. From "
        f"that day on, {hero} and the {friend} were friends. The end."
    )
    return Turn(rng.choice(_STORY_FRAMES).format(n=hero), text, f"I tell a story about {hero}.")


def small_talk(rng: Random) -> Turn:
    kind = rng.random()
    if kind < 0.7:
        # The first thing that people ask a model is who it is.
        asks, answer, thought = rng.choices(_FIXED, [4.0 if f[1] == _ME else 1.0 for f in _FIXED])[
            0
        ]
        return Turn(rng.choice(asks), answer, thought)
    if kind < 0.85:
        ask = rng.choice(_UNKNOWABLE).format(w=rng.choice(COMMON), n=name(rng))
        return Turn(ask, _UNKNOWN, "I have not learned that.")
    return _story(rng)
