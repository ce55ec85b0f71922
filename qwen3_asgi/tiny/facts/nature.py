"""Animals, plants and the colours of things."""

from .relation import Relation, lines, rows

NATURE = (
    Relation(
        name="young",
        rows=rows("""
            dog: puppy; cat: kitten; cow: calf; horse: foal; sheep: lamb; goat: kid; pig: piglet;
            hen: chick; duck: duckling; goose: gosling; swan: cygnet; lion: cub; deer: fawn;
            kangaroo: joey; frog: tadpole; owl: owlet; rabbit: bunny; seal: pup
        """),
        answer="A young {x} is called a {y}.",
        thought="The user asks for the young of {ax}. It is called a {y}.",
        nouns=("the name of a young {x}", "the word for a baby {x}"),
        clauses=("what a young {x} is called", "how we call a baby {x}"),
        questions=lines("""
            What is a young {x} called?
            What is a baby {x} called?
            What do we call a baby {x}?
            How do you call a young {x}?
            What is the baby of {ax}?
            What is the young of {ax}?
            A baby {x} is called what?
            Which word do we use for a young {x}?
        """),
        unseen=lines("""
            What is the baby of {ax} called?
            How do we call the young of {ax}?
            What do people call a young {x}?
        """),
        statements=("A young {x} is called a {y}.", "A baby {x} is a {y}."),
        follow_up="{ax}",
    ),
    Relation(
        name="sound",
        rows=rows("""
            dog: barks; cat: meows; cow: moos; horse: neighs; sheep: bleats; duck: quacks;
            lion: roars; owl: hoots; bee: buzzes; snake: hisses; frog: croaks; wolf: howls;
            mouse: squeaks; pig: grunts; rooster: crows; donkey: brays; bird: sings
        """),
        answer="{AX} {y}.",
        thought="The user asks for the sound of {ax}. {AX} {y}.",
        nouns=("the sound of {ax}", "the noise of {ax}"),
        clauses=("which sound {ax} makes", "what sound {ax} makes"),
        questions=lines("""
            What sound does {ax} make?
            Which sound does {ax} make?
            What noise does {ax} make?
            How does {ax} sound?
            What does {ax} sound like?
            {AX} makes which sound?
            What is the sound of {ax}?
            Which noise comes from {ax}?
        """),
        unseen=lines("""
            Which noise does {ax} make?
            What kind of sound does {ax} make?
            {AX} makes what noise?
        """),
        statements=("{AX} {y}.",),
        follow_up="{ax}",
    ),
    Relation(
        name="legs",
        rows=rows("""
            dog: four; cat: four; horse: four; cow: four; sheep: four; bird: two; hen: two;
            duck: two; human: two; ant: six; bee: six; beetle: six; butterfly: six; fly: six;
            spider: eight; crab: ten; snake: no; fish: no; worm: no
        """),
        answer="{AX} has {y} legs.",
        thought="The user asks how many legs {ax} has. It has {y} legs.",
        nouns=("the number of legs of {ax}",),
        clauses=("how many legs {ax} has", "on how many legs {ax} walks"),
        questions=lines("""
            How many legs does {ax} have?
            How many legs has {ax}?
            What is the number of legs of {ax}?
            {AX} has how many legs?
            On how many legs does {ax} walk?
            Count the legs of {ax}.
            How many legs do you see on {ax}?
        """),
        unseen=lines("""
            {AX}: how many legs?
            How many legs are there on {ax}?
            How many legs can you count on {ax}?
        """),
        statements=("{AX} has {y} legs.",),
        follow_up="{ax}",
    ),
    Relation(
        name="class",
        rows=rows("""
            dog: mammal; cat: mammal; whale: mammal; horse: mammal; bat: mammal; dolphin: mammal;
            lion: mammal; elephant: mammal; eagle: bird; sparrow: bird; owl: bird; penguin: bird;
            duck: bird; parrot: bird; salmon: fish; shark: fish; trout: fish; tuna: fish;
            ant: insect; bee: insect; butterfly: insect; beetle: insect; snake: reptile;
            lizard: reptile; turtle: reptile; crocodile: reptile; frog: amphibian; toad: amphibian
        """),
        answer="{AX} is {ay}.",
        thought="The user asks what kind of animal {ax} is. It is {ay}.",
        nouns=("the animal class of {ax}", "the kind of animal that {ax} is"),
        clauses=("what kind of animal {ax} is", "to which class of animals {ax} belongs"),
        questions=lines("""
            What kind of animal is {ax}?
            Which kind of animal is {ax}?
            What type of animal is {ax}?
            {AX} is what kind of animal?
            To which class of animals does {ax} belong?
            What sort of animal is {ax}?
            Is {ax} a mammal, a bird, a fish, a reptile, an amphibian or an insect?
        """),
        unseen=lines("""
            Which type of animal is {ax}?
            {AX} is which kind of animal?
            To what class of animals does {ax} belong?
        """),
        statements=("{AX} is {ay}.",),
        follow_up="{ax}",
    ),
    Relation(
        name="home",
        rows=rows("""
            bird: nest; bee: hive; dog: kennel; horse: stable; spider: web; fox: den;
            rabbit: burrow; cow: barn; pig: sty; monkey: jungle; camel: desert; bear: cave;
            ant: colony
        """),
        answer="{AX} lives in a {y}.",
        thought="The user asks where {ax} lives. It lives in a {y}.",
        nouns=("the home of {ax}", "the place where {ax} lives"),
        clauses=("where {ax} lives", "in what {ax} lives"),
        questions=lines("""
            Where does {ax} live?
            In what does {ax} live?
            What is the home of {ax}?
            Where is the home of {ax}?
            {AX} lives where?
            What does {ax} live in?
            What kind of home does {ax} have?
        """),
        unseen=("In which place does {ax} live?", "Where can I find the home of {ax}?"),
        statements=("{AX} lives in a {y}.",),
        follow_up="{ax}",
    ),
    Relation(
        name="colour",
        rows=rows("""
            grass: green; the sky: blue; snow: white; coal: black; blood: red; a banana: yellow;
            a carrot: orange; a lemon: yellow; a tomato: red; milk: white; the night: black;
            chocolate: brown; a frog: green; the sea: blue; a strawberry: red; a violet: purple;
            a flamingo: pink; an elephant: grey; a leaf: green; the sun: yellow; an orange: orange;
            a cucumber: green; a crow: black; a swan: white; a cherry: red; gold: yellow
        """),
        answer="{X} is {y}.",
        thought="The user asks for the colour of {x}. It is {y}.",
        nouns=("the colour of {x}", "the color of {x}"),
        clauses=("what colour {x} is", "which colour {x} has", "what color {x} is"),
        questions=lines("""
            What colour is {x}?
            What color is {x}?
            Which colour is {x}?
            Which colour does {x} have?
            What colour does {x} have?
            {X} has which colour?
            {X} is what colour?
            In which colour would you paint {x}?
        """),
        unseen=lines("""
            {X} is which colour?
            What color does {x} have?
            {X} has what colour?
        """),
        statements=("{X} is {y}.", "The colour of {x} is {y}."),
        follow_up="of {x}",
    ),
    Relation(
        name="source",
        rows=rows("""
            milk: a cow; honey: a bee; wool: a sheep; an egg: a hen; silk: a silkworm; ham: a pig;
            an apple: a tree; a grape: a vine; bread: flour; wine: grapes; cheese: milk;
            paper: wood; butter: cream; juice: fruit; flour: wheat; a raisin: a grape
        """),
        answer="{X} comes from {y}.",
        thought="The user asks where {x} comes from. It comes from {y}.",
        nouns=("the source of {x}", "the origin of {x}"),
        clauses=("where {x} comes from", "what {x} comes from"),
        questions=lines("""
            Where does {x} come from?
            From what does {x} come?
            What does {x} come from?
            What gives us {x}?
            From where do we get {x}?
            {X} comes from what?
            Who or what gives us {x}?
        """),
        unseen=("From what do we get {x}?", "{X} comes from where?"),
        statements=("{X} comes from {y}.",),
        follow_up="{x}",
    ),
)
