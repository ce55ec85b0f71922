"""Words and their forms: opposites, plurals, past tenses, degrees, and greetings abroad."""

from .relation import Relation, lines, rows

_OPPOSITES = rows("""
hot: cold; big: small; tall: short; fast: slow; happy: sad; old: young; good: bad; day: night;
light: dark; up: down; left: right; open: closed; full: empty; hard: soft; wet: dry; clean: dirty;
rich: poor; strong: weak; early: late; high: low; loud: quiet; long: brief; near: far; true: false;
first: last; inside: outside; heavy: lightweight; easy: difficult; win: lose; push: pull; buy: sell;
begin: end; love: hate; north: south; east: west; black: white; thick: thin; wide: narrow;
sweet: bitter; war: peace; life: death; friend: enemy; sunrise: sunset; always: never; yes: no;
cold: hot; small: big; slow: fast; sad: happy; night: day; dark: light; down: up; right: left;
empty: full; soft: hard; dry: wet; dirty: clean; poor: rich; weak: strong; late: early; low: high;
quiet: loud; far: near; false: true; south: north; west: east; white: black; peace: war
""")

_PLURALS = rows("""
mouse: mice; child: children; foot: feet; tooth: teeth; goose: geese; man: men; woman: women;
ox: oxen; sheep: sheep; leaf: leaves; knife: knives; wolf: wolves; wife: wives; city: cities;
baby: babies; party: parties; box: boxes; bus: buses; dish: dishes; fox: foxes; dog: dogs;
cat: cats; house: houses; book: books; tree: trees; car: cars; potato: potatoes; tomato: tomatoes;
hero: heroes; shelf: shelves; person: people; lady: ladies; story: stories; church: churches;
glass: glasses; loaf: loaves; apple: apples; flower: flowers; river: rivers; bird: birds
""")

_PAST = rows("""
go: went; see: saw; eat: ate; drink: drank; run: ran; write: wrote; read: read; speak: spoke;
take: took; give: gave; come: came; find: found; make: made; say: said; think: thought; buy: bought;
bring: brought; teach: taught; catch: caught; swim: swam; sing: sang; fly: flew; know: knew;
grow: grew; drive: drove; ride: rode; break: broke; sleep: slept; keep: kept; leave: left;
lose: lost; win: won; sit: sat; stand: stood; walk: walked; play: played; work: worked; jump: jumped
""")

_COMPARATIVES = rows("""
big: bigger; small: smaller; tall: taller; fast: faster; slow: slower; old: older; good: better;
bad: worse; happy: happier; hot: hotter; cold: colder; strong: stronger; long: longer; easy: easier;
heavy: heavier; young: younger; rich: richer; far: farther; thin: thinner; wide: wider
""")

_FEMININE = rows("""
king: queen; man: woman; boy: girl; father: mother; brother: sister; son: daughter; uncle: aunt;
prince: princess; husband: wife; actor: actress; grandfather: grandmother; nephew: niece;
waiter: waitress; lion: lioness; rooster: hen; bull: cow
""")

_HELLO = rows("""
French: bonjour; Spanish: hola; German: hallo; Italian: ciao; Portuguese: ola; Japanese: konnichiwa;
Polish: cześć; Swedish: hej; Russian: привет; Chinese: 你好; Turkish: merhaba; Hawaiian: aloha;
Greek: γεια; Hindi: namaste
""")


def _word_form(name: str, pairs: tuple[tuple[str, str], ...], form: str, ask: str) -> Relation:
    """A relation between a word and one of its forms, asked in the usual ways."""
    return Relation(
        name=name,
        rows=pairs,
        answer=f"The {form} of {{x}} is {{y}}.",
        thought=f"The user asks for the {form} of {{x}}. It is {{y}}.",
        nouns=(f"the {form} of {{x}}", f"the {form} of the word {{x}}", f"{ask} {{x}}"),
        clauses=(f"what the {form} of {{x}} is", f"which word is the {form} of {{x}}"),
        questions=lines(f"""
            Which word is the {form} of {{x}}?
            What is the {form} of the word {{x}}?
            {{X}} has which {form}?
            The {form} of {{x}} is what?
            What is the {form} form of {{x}}?
            {{X}}: what is the {form}?
            Please write the {form} of {{x}}.
            How do you say the {form} of {{x}}?
            What is {ask} {{x}}?
            Give the {form} of "{{x}}".
        """),
        unseen=lines(f"""
            What word is the {form} of {{x}}?
            Which {form} does {{x}} have?
            Write down the {form} of the word {{x}}.
        """),
        statements=(f"The {form} of {{x}} is {{y}}.",),
        follow_up="of {x}",
    )


LANGUAGE = (
    _word_form("opposite", _OPPOSITES, "opposite", "the contrary of"),
    _word_form("plural", _PLURALS, "plural", "the word for many of"),
    _word_form("past", _PAST, "past tense", "the past of"),
    _word_form("comparative", _COMPARATIVES, "comparative", "the stronger form of"),
    _word_form("feminine", _FEMININE, "feminine", "the female form of"),
    Relation(
        name="hello",
        rows=_HELLO,
        answer="Hello in {x} is {y}.",
        thought="The user asks how to say hello in {x}. It is {y}.",
        nouns=("the word for hello in {x}", "the {x} word for hello"),
        clauses=("how to say hello in {x}", "what hello is in {x}"),
        questions=lines("""
            How do you say hello in {x}?
            How do I say hello in {x}?
            What is hello in {x}?
            What is the {x} word for hello?
            Say hello in {x}.
            Translate hello into {x}.
            Which word means hello in {x}?
            How do people greet in {x}?
        """),
        unseen=lines("""
            What does one say for hello in {x}?
            How do people say hello in {x}?
            Which {x} word means hello?
        """),
        statements=("Hello in {x} is {y}.",),
        follow_up="in {x}",
    ),
)
