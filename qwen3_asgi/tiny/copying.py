"""Repeating words, and remembering what was said earlier in the chat or in the system prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from .chat import fact_turn, pick
from .sample import Dialogue, assistant, system, user
from .smalltalk import small_talk
from .turns import Turn, any_system, any_thinking, compose
from .words import city, name, phrase, word

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

ECHO_FRAMES = (
    "Repeat after me: {t}", "Repeat: {t}", "Repeat this: {t}", "Say: {t}", "Say '{t}'.",
    'Say "{t}".', "Please repeat: {t}", "Please say: {t}", "Echo: {t}", "Write: {t}",
    "Write exactly this: {t}", "Copy this text: {t}", "Say exactly: {t}", "Say {t}",
    "Repeat this sentence: {t}", "Repeat the words: {t}", 'Can you say "{t}"?',
    'Please write "{t}".', "Can you repeat this? {t}", "Write these words: {t}", "Copy: {t}",
    'Repeat "{t}".', "Repeat after me. {t}", "Now say: {t}", "Hello! Please repeat this: {t}",
)  # fmt: skip
UNSEEN_ECHO_FRAMES = (
    "Please repeat after me: {t}", "Repeat these words: {t}", 'Can you repeat "{t}"?',
    "Copy exactly this: {t}", "Please write these words: {t}",
)  # fmt: skip


class Memory(NamedTuple):
    """Something about the user: how it is told, acknowledged, asked for and answered."""

    draw: Callable[[Random], str]
    told: tuple[str, ...]
    reply: str
    asked: tuple[str, ...]
    unseen: tuple[str, ...]
    answer: str


MEMORIES = (
    Memory(
        name,
        ("My name is {v}.", "Hello, I am {v}.", "Hi, my name is {v}.", "I am {v}.", "I'm {v}.",
         "You can call me {v}.", "Hello! My name is {v}.", "People call me {v}."),
        "Nice to meet you, {v}.",
        ("What is my name?", "Do you remember my name?", "What's my name?", "Tell me my name.",
         "Can you tell me my name?", "Who am I?", "Do you know my name?", "Please say my name.",
         "What am I called?", "So, what is my name?"),
        ("Could you tell me my name?", "Now tell me my name.", "Do you still know my name?"),
        "Your name is {v}.",
    ),
    Memory(
        city,
        ("I live in {v}.", "My home is in {v}.", "I am from {v}.", "I come from {v}."),
        "I will remember that.",
        ("Where do I live?", "In which city do I live?", "Where is my home?", "Where am I from?",
         "Do you remember where I live?"),
        ("Do you know where I live?", "In which city is my home?"),
        "You live in {v}.",
    ),
    Memory(
        name,
        ("My dog is called {v}.", "I have a dog called {v}.", "The name of my dog is {v}."),
        "I will remember that.",
        ("What is my dog called?", "What is the name of my dog?", "How is my dog called?",
         "Tell me the name of my dog."),
        ("Do you remember the name of my dog?", "What's the name of my dog?"),
        "Your dog is called {v}.",
    ),
    Memory(
        word,
        ("The secret word is {v}.", "Remember this word: {v}", "Please remember the word {v}.",
         "The code word is {v}.", "Remember the word {v}."),
        "I will remember that.",
        ("What is the secret word?", "What was the word?", "Which word did I tell you?",
         "What is the code word?", "Tell me the secret word."),
        ("What was the secret word?", "Do you remember the word?"),
        "The word is {v}.",
    ),
)  # fmt: skip


def echo_turn(text: str, frame: str) -> Turn:
    return Turn(frame.format(t=text), text, "The user wants me to repeat the words.")


def echo(rng: Random) -> Dialogue:
    longest = rng.choice((2, 5, 8, 12))
    turns = [
        echo_turn(phrase(rng, longest), rng.choice(ECHO_FRAMES))
        for _ in range(rng.choice((1, 1, 2, 3)))
    ]
    return compose(turns, thinking=any_thinking(rng), instruction=any_system(rng))


def recall_turns(rng: Random, memory: Memory, value: str, ask: str) -> list[Turn]:
    told = rng.choice(memory.told).format(v=value)
    answer = memory.answer.format(v=value)
    return [
        Turn(told, memory.reply.format(v=value), "The user tells me something."),
        Turn(ask, answer, f"The user told me this before. {answer}"),
    ]


def recall(rng: Random) -> Dialogue:
    """Told first, asked later, sometimes with other talk in between."""
    memory = rng.choice((MEMORIES[0], *MEMORIES))
    told, asked = recall_turns(rng, memory, memory.draw(rng), rng.choice(memory.asked))
    between = [
        small_talk(rng) if rng.random() < 0.3 else fact_turn(rng, *pick(rng))
        for _ in range(rng.choice((0, 0, 0, 1, 1, 2, 3)))
    ]
    turns = [told, *between, asked]
    if rng.random() < 0.15:
        turns = [Turn(f"{told.ask} {asked.ask}", asked.answer, asked.thought)]
    elif rng.random() < 0.1:
        turns = [told]
    return compose(turns, thinking=any_thinking(rng), instruction=any_system(rng))


def instructed(rng: Random) -> Dialogue:
    """A name or a code word that only the system prompt holds."""
    value = name(rng)
    if rng.random() < 0.6:
        instruction = rng.choice(("Your name is {v}.", "You are {v}.", "You are called {v}."))
        ask = rng.choice(("What is your name?", "Who are you?", "What's your name?"))
        answer = f"My name is {value}."
    else:
        instruction = rng.choice(("The code word is {v}.", "The secret word is {v}."))
        ask = rng.choice(("What is the code word?", "What is the secret word?"))
        answer = f"The word is {value}."
    thinking = any_thinking(rng)
    return Dialogue(
        (
            system(instruction.format(v=value)),
            user(ask),
            assistant(answer, "The system prompt says it." if thinking else ""),
        ),
        (),
        thinking,
    )
