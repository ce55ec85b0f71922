"""Words to copy: names, cities, common and invented words, and text outside ASCII."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .facts import RELATIONS
from .facts.relation import split

if TYPE_CHECKING:
    from random import Random

NAMES = split("""
    Adam Alice Amir Andrea Anna Anton Bella Ben Boris Carla Carlos Chen Clara Daniel Dora
    Elena Elias Ella Emil Emma Eric Eva Felix Finn Frank Frida George Greta Hana Hans Helen
    Henry Ida Igor Ines Ivan Jack Jakob James Jan Jane Jonas Julia Karl Kate Kim Lara Laura
    Lena Leo Lily Lina Linus Louis Lucy Luis Maria Marco Martha Martin Mary Max Mia Milan Mila
    Nina Noah Nora Oleg Olga Oliver Oscar Otto Paul Paula Pedro Peter Petra Rita Robert Rosa
    Ruth Sam Sara Simon Sofia Susan Tara Theo Thomas Tina Tom Vera Victor Wanda Yusuf Zoe
""")
UNSEEN_NAMES = split("""
    Agnes Bruno Cecil Diana Edgar Flora Gustav Hilda Irene Jasper Kasimir Lydia Mabel Nadia
    Orlando Priya Quentin Ramona Stefan Ursula Violet Walter Xenia Yara Zelda
""")

CITIES = split("""
    Paris Berlin Rome Madrid Lisbon Vienna Athens Warsaw Oslo Dublin Cairo Tokyo London Boston
    Chicago Munich Hamburg Milan Naples Porto Sydney Toronto Lima Moscow Delhi Seoul Mumbai
    Dallas Denver Leeds Lyon Nice Bonn Basel Zurich Krakow Prague Riga Tallinn Vilnius Ankara
    Osaka Shanghai Nairobi Accra Dakar Havana Bogota Quito Santiago Manila Jakarta Hanoi Perth
    Helsinki Stockholm Copenhagen Budapest Brussels Amsterdam Bern Beijing Bangkok Ottawa
""")
UNSEEN_CITIES = split("""
    Geneva Kyoto Marseille Bristol Valencia Leipzig Seattle Bergen Turin Gdansk Malaga Dresden
    Adelaide Montreal Lagos Salzburg Granada Antwerp Cordoba Phoenix
""")

UNSEEN_WORDS = split("""
    lantern marble pumpkin velvet thunder puzzle harbour blanket whisper meadow cactus dragon
    feather goblin hollow jigsaw ladder magnet nutmeg orchid pebble quiver ribbon saddle
    timber umber vortex walnut yonder zipper basket canyon dimple ember fossil glacier
""")

_ASIDE = split("""
    hello world please thank you very much the a of and is are was it we they he she good
    morning evening friend today tomorrow yesterday little great nice new some many every
    never always house garden street school kitchen winter summer music story letter number
    question answer water fire stone cloud rain wind star moon sun sea hill road boat train
    plane test one two three four five red green blue yellow cat dog bird fish tree book door
    window table chair
""")

COMMON = tuple(
    sorted(
        {
            part
            for relation in RELATIONS
            for pair in relation.rows
            for side in pair
            for part in side.split()
            if part.isalpha()
        }
        | set(_ASIDE)
    )
)

_ONSETS = split("""
    b bl br c ch d dr f fl g gr h j k l m n p pr qu r s sh sk sl st t tr v w x y z
""")
_VOWELS = split("a e i o u ai ea ee ie oa oo ou")
_CODAS = ["", "", "", "b", "ck", "d", "ff", "g", "ll", "m", "n", "nd", "r", "rt", "s", "st", "x"]
_FOREIGN = split("""
    é ü ß ñ ø å ç ł ž č ö ä œ ğ Ω λ π γεια привет мир дом 你好 世界 猫 狗 水 日本
    こんにちは ありがとう
    안녕 नमस्ते
    سلام שלום 🙂 🚀 🎉 ❤ 🐱 🌍 👍 ☕ € £ ½ → ✓ café naïve señor Größe Øre
""")


_RESERVED = {word.lower() for word in (*UNSEEN_NAMES, *UNSEEN_CITIES, *UNSEEN_WORDS)}


def invented(rng: Random) -> str:
    """A pronounceable word that isn't one; it teaches copying, not memory."""
    return "".join(
        rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_CODAS)
        for _ in range(rng.choice((1, 2, 2, 3)))
    )


def _fresh(word: str) -> str:
    return word if word.lower() not in _RESERVED else word + "o"


def name(rng: Random) -> str:
    if rng.random() < 0.55:
        return rng.choice(NAMES)
    return _fresh(invented(rng)).capitalize()


def city(rng: Random) -> str:
    if rng.random() < 0.55:
        return rng.choice(CITIES)
    return _fresh(invented(rng)).capitalize()


def word(rng: Random) -> str:
    """Mostly common words; often invented ones; sometimes names, digits or another script."""
    kind = rng.random()
    if kind < 0.45:
        return _fresh(rng.choice(COMMON))
    if kind < 0.8:
        return _fresh(invented(rng))
    if kind < 0.87:
        return name(rng)
    if kind < 0.93:
        return str(rng.randrange(1000))
    return rng.choice(_FOREIGN)


def phrase(rng: Random, longest: int = 7) -> str:
    text = " ".join(word(rng) for _ in range(rng.randint(1, longest)))
    if rng.random() < 0.3:
        text = text.capitalize()
    if rng.random() < 0.2:
        text += rng.choice(".!?")
    return text
