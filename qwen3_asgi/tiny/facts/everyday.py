"""Jobs, materials, groups of things, tastes, senses, and the calendar."""

from .relation import Relation, Row, lines, rows, split

_JOBS = rows("""
bakes bread: baker; teaches children: teacher; heals sick people: doctor; flies a plane: pilot;
cooks meals: cook; drives a bus: driver; puts out fires: firefighter; cuts hair: hairdresser;
repairs cars: mechanic; paints pictures: painter; writes books: writer; grows food: farmer;
catches fish: fisherman; builds houses: builder; sells flowers: florist; mends teeth: dentist;
delivers letters: postman; sails a ship: sailor; sings songs: singer; makes clothes: tailor;
sells meat: butcher; treats animals: vet; works with wood: carpenter;
takes photographs: photographer
""")

_MATERIALS = rows("""
window: glass; table: wood; ring: gold; sweater: wool; book: paper; tyre: rubber; shoe: leather;
coin: metal; shirt: cotton; candle: wax; wall: stone; bottle: plastic; nail: iron; vase: clay;
house: brick; newspaper: paper; door: wood; bridge: steel; towel: cotton; mirror: glass
""")

_GROUPS = rows("""
apple: fruit; banana: fruit; cherry: fruit; pear: fruit; carrot: vegetable; onion: vegetable;
cabbage: vegetable; potato: vegetable; violin: instrument; piano: instrument; guitar: instrument;
flute: instrument; hammer: tool; saw: tool; screwdriver: tool; rose: flower; tulip: flower;
daisy: flower; oak: tree; pine: tree; birch: tree; car: vehicle; bus: vehicle; bicycle: vehicle;
chair: piece of furniture; table: piece of furniture; sofa: piece of furniture; tennis: sport;
football: sport; chess: game; red: colour; blue: colour; shirt: piece of clothing;
coat: piece of clothing; tea: drink; coffee: drink; Monday: day; May: month
""")

_TASTES = rows("""
sugar: sweet; honey: sweet; a lemon: sour; vinegar: sour; salt: salty; sea water: salty;
coffee: bitter; chili: hot; candy: sweet; chocolate: sweet; pepper: hot
""")

_SENSES = rows("""
see: eyes; hear: ears; smell: nose; taste: tongue; walk: legs; bite: teeth; think: brain;
hold: hands; breathe: lungs; touch: fingers
""")

_USES = rows("""
cut paper: scissors; write: a pen; eat soup: a spoon; open a lock: a key; dry the hands: a towel;
sweep the floor: a broom; drive in a nail: a hammer; tell the time: a clock; boil water: a kettle;
stay dry in the rain: an umbrella; cut bread: a knife; take a picture: a camera; sew: a needle;
brush the teeth: a toothbrush; measure heat: a thermometer; find the north: a compass
""")

_AMOUNTS = rows("""
minutes in an hour: sixty; seconds in a minute: sixty; hours in a day: twenty-four;
days in a week: seven; months in a year: twelve; days in a year: 365; seasons in a year: four;
letters in the alphabet: twenty-six; years in a century: one hundred; years in a decade: ten;
wheels on a bicycle: two; wheels on a car: four; fingers on a hand: five; eggs in a dozen: twelve;
strings on a violin: four; players in a football team: eleven; colours in a rainbow: seven;
continents in the world: seven; planets around the sun: eight; metres in a kilometre: one thousand;
grams in a kilogram: one thousand; centimetres in a metre: one hundred
""")

_RECORDS = rows("""
largest ocean: the Pacific; largest planet: Jupiter; largest animal: the blue whale;
tallest animal: the giraffe; fastest land animal: the cheetah; highest mountain: Mount Everest;
largest continent: Asia; smallest continent: Australia; largest country: Russia;
hottest planet: Venus; smallest planet: Mercury; largest bird: the ostrich; longest bone: the femur;
shortest month: February; first month: January; last month: December; first day: Monday
""")

_DAYS = split("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
_MONTHS = split("""
    January February March April May June July August September October November December
""")
_ORDINALS = split("""
    first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth
""")
_LENGTHS = split("31 28 31 30 31 30 31 31 30 31 30 31")
_SEASONS = rows("spring: summer; summer: autumn; autumn: winter; winter: spring")


def _successors(names: tuple[str, ...]) -> tuple[Row, ...]:
    return tuple(zip(names, names[1:] + names[:1], strict=True))


def _predecessors(names: tuple[str, ...]) -> tuple[Row, ...]:
    return tuple(zip(names, names[-1:] + names[:-1], strict=True))


def _neighbour(name: str, kind: str, side: str, verb: str, pairs: tuple[Row, ...]) -> Relation:
    """What comes after or before a day, a month or a season."""
    return Relation(
        name=name,
        rows=pairs,
        answer=f"The {kind} {side} {{x}} is {{y}}.",
        thought=f"The user asks for the {kind} {side} {{x}}. It is {{y}}.",
        nouns=(f"the {kind} {side} {{x}}",),
        clauses=(f"which {kind} comes {side} {{x}}", f"what {kind} {verb} {{x}}"),
        questions=lines(f"""
            Which {kind} comes {side} {{x}}?
            What {kind} comes {side} {{x}}?
            Which {kind} {verb} {{x}}?
            Which {kind} is {side} {{x}}?
            What comes {side} {{x}}?
            {side.capitalize()} {{x}} or {side} that: which {kind} is directly {side} {{x}}?
        """),
        unseen=lines(f"""
            What {kind} is {side} {{x}}?
            Which is the {kind} that {verb} {{x}}?
            Which {kind} comes directly {side} {{x}}?
        """),
        statements=(f"The {kind} {side} {{x}} is {{y}}.",),
        follow_up=f"{side} {{x}}",
    )


EVERYDAY = (
    Relation(
        name="job",
        rows=_JOBS,
        answer="A {y} {x}.",
        thought="The user asks who {x}. It is a {y}.",
        nouns=("the person who {x}", "the name of the job of a person who {x}"),
        clauses=("who {x}", "what a person who {x} is called"),
        questions=lines("""
            Who {x}?
            Which person {x}?
            Who is it that {x}?
            What is a person who {x} called?
            What do you call a person who {x}?
            Which job has a person who {x}?
            A person who {x} is called what?
        """),
        unseen=lines("""
            What do we call someone who {x}?
            What is the job of a person who {x}?
            Who is the person that {x}?
        """),
        statements=("A {y} {x}.", "A person who {x} is a {y}."),
    ),
    Relation(
        name="material",
        rows=_MATERIALS,
        answer="{AX} is made of {y}.",
        thought="The user asks what {ax} is made of. It is made of {y}.",
        nouns=("the material of {ax}", "the usual material for {ax}"),
        clauses=("what {ax} is made of", "of which material {ax} is made"),
        questions=lines("""
            What is {ax} made of?
            Of what is {ax} made?
            Which material is {ax} made of?
            From which material do people make {ax}?
            {AX} is made of what?
            What material is used for {ax}?
            Which material do I need for {ax}?
        """),
        unseen=lines("""
            What material is {ax} made of?
            {AX} is made of which material?
            Of which material do people make {ax}?
        """),
        statements=("{AX} is made of {y}.",),
        follow_up="{ax}",
    ),
    Relation(
        name="group",
        rows=_GROUPS,
        answer="{X} is a {y}.",
        thought="The user asks what kind of thing {x} is. It is a {y}.",
        nouns=("the kind of thing that {x} is", "the group of {x}"),
        clauses=("what kind of thing {x} is", "to which group {x} belongs"),
        questions=lines("""
            What kind of thing is {x}?
            Which kind of thing is {x}?
            To which group does {x} belong?
            {X} is what kind of thing?
            What sort of thing is {x}?
            {X} belongs to which group?
        """),
        unseen=("What type of thing is {x}?", "{X} is which kind of thing?"),
        statements=("{X} is a {y}.",),
        follow_up="{x}",
    ),
    Relation(
        name="taste",
        rows=_TASTES,
        answer="{X} tastes {y}.",
        thought="The user asks for the taste of {x}. It tastes {y}.",
        nouns=("the taste of {x}",),
        clauses=("how {x} tastes", "what taste {x} has"),
        questions=lines("""
            How does {x} taste?
            What does {x} taste like?
            Which taste does {x} have?
            {X} tastes how?
            {X} has which taste?
            What is the taste of {x}?
        """),
        unseen=("What taste does {x} have?", "What kind of taste has {x}?"),
        statements=("{X} tastes {y}.",),
        follow_up="{x}",
    ),
    Relation(
        name="sense",
        rows=_SENSES,
        answer="We {x} with the {y}.",
        thought="The user asks what we {x} with. We use the {y}.",
        nouns=("the part of the body that we {x} with",),
        clauses=("what we {x} with", "with what people {x}"),
        questions=lines("""
            What do we {x} with?
            With what do we {x}?
            What do people {x} with?
            Which part of the body do we use to {x}?
            Which part of the body do you {x} with?
            People {x} with what?
        """),
        unseen=("With what do people {x}?", "With which part of the body do we {x}?"),
        statements=("We {x} with the {y}.",),
    ),
    Relation(
        name="use",
        rows=_USES,
        answer="You need {y} to {x}.",
        thought="The user wants to {x}. That needs {y}.",
        nouns=("the thing that I need to {x}", "the right thing to {x}"),
        clauses=("what I need to {x}", "what people use to {x}"),
        questions=lines("""
            What do I need to {x}?
            What do you need to {x}?
            What do people use to {x}?
            Which thing do I need to {x}?
            I want to {x}. What do I need?
            To {x}, what should I use?
            What is used to {x}?
        """),
        unseen=("What should I use to {x}?", "I want to {x}. What should I take?"),
        statements=("You need {y} to {x}.",),
    ),
    Relation(
        name="amount",
        rows=_AMOUNTS,
        answer="There are {y} {x}.",
        thought="The user asks for the number of {x}. There are {y}.",
        nouns=("the number of {x}",),
        clauses=("how many {x} there are",),
        questions=lines("""
            How many {x}?
            How many {x} are there?
            There are how many {x}?
            What is the number of {x}?
            How many {x} do we count?
        """),
        unseen=("How many {x} can we count?", "{X}: how many are there?"),
        statements=("There are {y} {x}.",),
    ),
    Relation(
        name="record",
        rows=_RECORDS,
        answer="The {x} is {y}.",
        thought="The user asks for the {x}. It is {y}.",
        nouns=("the {x}", "the name of the {x}", "the {x} of all"),
        clauses=("what the {x} is", "how the {x} is called"),
        questions=lines("""
            Which is the {x}?
            What is the {x} of all?
            What is the name of the {x}?
            What do we call the {x}?
            The {x} is which one?
        """),
        unseen=("Which one is the {x}?", "What is the {x} called?"),
        statements=("The {x} is {y}.",),
    ),
    _neighbour("day_after", "day", "after", "follows", _successors(_DAYS)),
    _neighbour("day_before", "day", "before", "precedes", _predecessors(_DAYS)),
    _neighbour("month_after", "month", "after", "follows", _successors(_MONTHS)),
    _neighbour("month_before", "month", "before", "precedes", _predecessors(_MONTHS)),
    _neighbour("season_after", "season", "after", "follows", _SEASONS),
    Relation(
        name="nth_month",
        rows=tuple(zip(_ORDINALS, _MONTHS, strict=True)),
        answer="The {x} month of the year is {y}.",
        thought="The user asks for the {x} month. It is {y}.",
        nouns=("the {x} month of the year", "the name of the {x} month"),
        clauses=("which month is the {x} of the year", "how the {x} month is called"),
        questions=lines("""
            Which month is the {x} of the year?
            What is the {x} month?
            Which is the {x} month of the year?
            What month comes {x} in the year?
            What is the name of the {x} month of the year?
        """),
        unseen=("What month is the {x} of the year?", "Which month comes {x} in the year?"),
        statements=("The {x} month of the year is {y}.",),
    ),
    Relation(
        name="month_length",
        rows=tuple(zip(_MONTHS, _LENGTHS, strict=True)),
        answer="{x} has {y} days.",
        thought="The user asks for the length of {x}. It has {y} days.",
        nouns=("the number of days in {x}", "the length of {x}"),
        clauses=("how many days {x} has", "how long {x} is"),
        questions=lines("""
            How many days does {x} have?
            How many days are there in {x}?
            How many days has {x}?
            How long is {x}?
            {x} has how many days?
            How many days are in {x}?
        """),
        unseen=("How many days can we count in {x}?", "{x}: how many days?"),
        statements=("{x} has {y} days.",),
        follow_up="{x}",
    ),
)
