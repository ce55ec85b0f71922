"""Elements, planets, shapes, numbers, letters and small arithmetic."""

from itertools import pairwise

from .relation import Relation, Row, lines, reversed_rows, rows, split

_SYMBOLS = rows("""
hydrogen: H; helium: He; carbon: C; nitrogen: N; oxygen: O; sodium: Na; magnesium: Mg;
aluminium: Al; silicon: Si; sulfur: S; chlorine: Cl; potassium: K; calcium: Ca; iron: Fe;
copper: Cu; zinc: Zn; silver: Ag; tin: Sn; gold: Au; mercury: Hg; lead: Pb; neon: Ne;
nickel: Ni; lithium: Li; iodine: I; uranium: U
""")

_PLANETS = rows("""
first: Mercury; second: Venus; third: Earth; fourth: Mars; fifth: Jupiter; sixth: Saturn;
seventh: Uranus; eighth: Neptune
""")

_SIDES = rows("""
triangle: three; square: four; rectangle: four; pentagon: five; hexagon: six; heptagon: seven;
octagon: eight; circle: no
""")

_UNITS = split("""
    zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen
    fifteen sixteen seventeen eighteen nineteen
""")
_TENS = split("twenty thirty forty fifty sixty seventy eighty ninety")
_ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def number_word(number: int) -> str:
    """The English word for 0 to 100."""
    if number < 20:
        return _UNITS[number]
    if number == 100:
        return "one hundred"
    tens, units = divmod(number, 10)
    return _TENS[tens - 2] + (f"-{_UNITS[units]}" if units else "")


def _arithmetic() -> tuple[Row, ...]:
    sums = [(f"{a} + {b}", str(a + b)) for a in range(11) for b in range(11)]
    differences = [(f"{a} - {b}", str(a - b)) for a in range(13) for b in range(min(a, 10) + 1)]
    products = [(f"{a} * {b}", str(a * b)) for a in range(11) for b in range(11)]
    return tuple(sums + differences + products)


def spoken(expression: str) -> str:
    """`3 + 4` as `3 plus 4`."""
    return expression.replace("+", "plus").replace("-", "minus").replace("*", "times")


SCIENCE = (
    Relation(
        name="symbol",
        rows=_SYMBOLS,
        answer="The chemical symbol for {x} is {y}.",
        thought="The user asks for the chemical symbol for {x}. It is {y}.",
        nouns=("the chemical symbol for {x}", "the chemical symbol of {x}", "the symbol for {x}"),
        clauses=("which chemical symbol {x} has", "how chemists write {x}"),
        questions=lines("""
            Which chemical symbol does {x} have?
            What symbol stands for {x}?
            Which symbol stands for {x}?
            How do chemists write {x}?
            {X} has which chemical symbol?
            {X}: what is the chemical symbol?
            What is the symbol of the element {x}?
        """),
        unseen=lines("""
            What chemical symbol stands for {x}?
            Which symbol do chemists write for {x}?
            Which symbol does the element {x} have?
        """),
        statements=("The chemical symbol for {x} is {y}.",),
        follow_up="for {x}",
    ),
    Relation(
        name="element",
        rows=reversed_rows(_SYMBOLS),
        answer="{x} is the chemical symbol for {y}.",
        thought="The user asks which element has the symbol {x}. It is {y}.",
        nouns=("the element with the symbol {x}", "the element {x}"),
        clauses=("which element has the symbol {x}", "what {x} stands for in chemistry"),
        questions=lines("""
            Which element has the symbol {x}?
            Which element has the chemical symbol {x}?
            What element is {x}?
            {x} is the symbol for which element?
            What does {x} stand for in chemistry?
            Which element do chemists write as {x}?
        """),
        unseen=lines("""
            What element has the chemical symbol {x}?
            For which element does {x} stand in chemistry?
        """),
        statements=("{x} is the chemical symbol for {y}.",),
        follow_up="{x}",
    ),
    Relation(
        name="planet",
        rows=_PLANETS,
        answer="The {x} planet from the sun is {y}.",
        thought="The user asks for the {x} planet from the sun. It is {y}.",
        nouns=("the {x} planet from the sun", "the name of the {x} planet"),
        clauses=("which planet is the {x} from the sun", "how the {x} planet is called"),
        questions=lines("""
            Which planet is the {x} from the sun?
            What is the {x} planet?
            Which is the {x} planet from the sun?
            What planet is {x} from the sun?
            What is the name of the {x} planet from the sun?
            Which planet comes {x}, counted from the sun?
        """),
        unseen=lines("""
            What planet is the {x} one from the sun?
            Counted from the sun, which planet is {x}?
        """),
        statements=("The {x} planet from the sun is {y}.",),
    ),
    Relation(
        name="sides",
        rows=_SIDES,
        answer="A {x} has {y} corners.",
        thought="The user asks how many corners a {x} has. It has {y} corners.",
        nouns=("the number of corners of a {x}", "the number of sides of a {x}"),
        clauses=("how many corners a {x} has", "how many sides a {x} has"),
        questions=lines("""
            How many corners does a {x} have?
            How many sides does a {x} have?
            How many corners has a {x}?
            A {x} has how many sides?
            A {x} has how many corners?
            Count the corners of a {x}.
        """),
        unseen=("How many sides are there on a {x}?", "A {x}: how many corners?"),
        statements=("A {x} has {y} corners.",),
        follow_up="a {x}",
    ),
    Relation(
        name="number",
        rows=tuple((str(n), number_word(n)) for n in range(101)),
        answer="The number {x} in words is {y}.",
        thought="The user asks for the number {x} in words. It is {y}.",
        nouns=("the number {x} in words", "the word for {x}", "the word for the number {x}"),
        clauses=("how to write {x} in words", "how the number {x} is written in words"),
        questions=lines("""
            How do you write {x} in words?
            Write {x} in words.
            Write the number {x} as a word.
            How do I write the number {x} in words?
            What is {x} in words?
            {x} in words?
            Spell the number {x}.
            How is {x} written in words?
        """),
        unseen=lines("""
            How do you spell the number {x}?
            Which word do we write for the number {x}?
            Please put the number {x} in words.
        """),
        statements=("The number {x} in words is {y}.",),
        follow_up="{x}",
    ),
    Relation(
        name="digits",
        rows=reversed_rows(tuple((str(n), number_word(n)) for n in range(101))),
        answer="The number {x} in digits is {y}.",
        thought="The user asks for the number {x} in digits. It is {y}.",
        nouns=("the number {x} in digits", "{x} in digits"),
        clauses=("how to write {x} in digits",),
        questions=lines("""
            How do you write {x} in digits?
            Write {x} in digits.
            Write the number {x} with digits.
            How do I write the number {x} in digits?
            How is {x} written in digits?
        """),
        unseen=("Please put the number {x} in digits.", "How do people write {x} with digits?"),
        statements=("The number {x} in digits is {y}.",),
    ),
    Relation(
        name="arithmetic",
        rows=_arithmetic(),
        answer="{x} = {y}",
        thought="I compute {x}. The result is {y}.",
        nouns=("{x}", "the result of {x}", "the value of {x}"),
        clauses=("how much {x} is", "what {x} makes"),
        questions=lines("""
            {x} = ?
            How much is {x}?
            Calculate {x}.
            Compute {x}.
            What is the result of {x}?
            What do you get for {x}?
            What does {x} make?
            {x} is how much?
            Solve {x}.
            Work out {x}.
        """),
        unseen=lines("""
            How much does {x} make?
            What result do you get for {x}?
            Please solve this: {x}
        """),
        statements=("{x} = {y}",),
        follow_up="{x}",
    ),
    Relation(
        name="next_letter",
        rows=tuple(pairwise(_ALPHABET)),
        answer="The letter after {x} is {y}.",
        thought="The user asks for the letter after {x}. It is {y}.",
        nouns=("the letter after {x}", "the next letter after {x}"),
        clauses=("which letter comes after {x}", "which letter follows {x}"),
        questions=lines("""
            Which letter comes after {x}?
            What letter comes after {x}?
            Which letter follows {x}?
            What comes after {x} in the alphabet?
            Which letter is next after {x}?
        """),
        unseen=("What letter follows {x}?", "In the alphabet, which letter comes after {x}?"),
        statements=("The letter after {x} is {y}.",),
    ),
    Relation(
        name="previous_letter",
        rows=tuple(zip(_ALPHABET[1:], _ALPHABET[:-1], strict=True)),
        answer="The letter before {x} is {y}.",
        thought="The user asks for the letter before {x}. It is {y}.",
        nouns=("the letter before {x}",),
        clauses=("which letter comes before {x}",),
        questions=lines("""
            Which letter comes before {x}?
            What letter comes before {x}?
            Which letter is before {x}?
            What comes before {x} in the alphabet?
        """),
        unseen=("What letter is before {x}?", "In the alphabet, which letter comes before {x}?"),
        statements=("The letter before {x} is {y}.",),
    ),
)
