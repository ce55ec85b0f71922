"""Countries, their capitals, continents, currencies and languages, and a few landmarks."""

from .relation import Relation, lines, reversed_rows, rows

_CAPITALS = rows("""
France: Paris; Germany: Berlin; Italy: Rome; Spain: Madrid; Portugal: Lisbon; Austria: Vienna;
Belgium: Brussels; Greece: Athens; Poland: Warsaw; Hungary: Budapest; Sweden: Stockholm;
Norway: Oslo; Finland: Helsinki; Denmark: Copenhagen; Ireland: Dublin; Iceland: Reykjavik;
Switzerland: Bern; Romania: Bucharest; Bulgaria: Sofia; Croatia: Zagreb; Serbia: Belgrade;
Ukraine: Kyiv; Russia: Moscow; Turkey: Ankara; Egypt: Cairo; Kenya: Nairobi; Ghana: Accra;
Nigeria: Abuja; Morocco: Rabat; Tunisia: Tunis; Senegal: Dakar; Ethiopia: Addis Ababa;
Japan: Tokyo; China: Beijing; India: New Delhi; Thailand: Bangkok; Vietnam: Hanoi;
Nepal: Kathmandu; Indonesia: Jakarta; Iran: Tehran; Iraq: Baghdad; Canada: Ottawa;
Mexico: Mexico City; Cuba: Havana; Brazil: Brasilia; Argentina: Buenos Aires; Chile: Santiago;
Peru: Lima; Colombia: Bogota; Uruguay: Montevideo; Australia: Canberra; New Zealand: Wellington
""")

_CONTINENTS = rows("""
France: Europe; Germany: Europe; Italy: Europe; Spain: Europe; Portugal: Europe; Austria: Europe;
Belgium: Europe; Greece: Europe; Poland: Europe; Hungary: Europe; Sweden: Europe; Norway: Europe;
Finland: Europe; Denmark: Europe; Ireland: Europe; Iceland: Europe; Switzerland: Europe;
Romania: Europe; Bulgaria: Europe; Croatia: Europe; Serbia: Europe; Ukraine: Europe;
Egypt: Africa; Kenya: Africa; Ghana: Africa; Nigeria: Africa; Morocco: Africa; Tunisia: Africa;
Senegal: Africa; Ethiopia: Africa; Japan: Asia; China: Asia; India: Asia; Thailand: Asia;
Vietnam: Asia; Nepal: Asia; Indonesia: Asia; Iran: Asia; Iraq: Asia; Canada: North America;
Mexico: North America; Cuba: North America; Brazil: South America; Argentina: South America;
Chile: South America; Peru: South America; Colombia: South America; Uruguay: South America
""")

_CURRENCIES = rows("""
France: euro; Germany: euro; Italy: euro; Spain: euro; Greece: euro; Austria: euro;
Ireland: euro; Finland: euro; Japan: yen; China: yuan; India: rupee; Mexico: peso;
Switzerland: franc; Sweden: krona; Norway: krone; Denmark: krone; Poland: zloty;
Hungary: forint; Turkey: lira; Russia: ruble; Brazil: real; Canada: dollar; Australia: dollar;
New Zealand: dollar; Thailand: baht; Vietnam: dong; Ukraine: hryvnia; Argentina: peso; Chile: peso
""")

_LANGUAGES = rows("""
France: French; Germany: German; Italy: Italian; Spain: Spanish; Portugal: Portuguese;
Austria: German; Greece: Greek; Poland: Polish; Hungary: Hungarian; Sweden: Swedish;
Norway: Norwegian; Finland: Finnish; Denmark: Danish; Iceland: Icelandic; Romania: Romanian;
Bulgaria: Bulgarian; Croatia: Croatian; Russia: Russian; Turkey: Turkish; Egypt: Arabic;
Japan: Japanese; China: Chinese; Thailand: Thai; Vietnam: Vietnamese; Mexico: Spanish;
Cuba: Spanish; Brazil: Portuguese; Argentina: Spanish; Chile: Spanish; Australia: English
""")

_LANDMARKS = rows("""
the Eiffel Tower: France; the Colosseum: Italy; the Great Wall: China; the Taj Mahal: India;
the Acropolis: Greece; Mount Fuji: Japan; Machu Picchu: Peru; the Sphinx: Egypt;
the Alhambra: Spain; the Brandenburg Gate: Germany; the Sydney Opera House: Australia;
the Little Mermaid: Denmark; the Kremlin: Russia; the Leaning Tower of Pisa: Italy
""")

GEOGRAPHY = (
    Relation(
        name="capital",
        rows=_CAPITALS,
        answer="The capital of {x} is {y}.",
        thought="The user asks for the capital of {x}. It is {y}.",
        nouns=("the capital of {x}", "the capital city of {x}", "{x}'s capital"),
        clauses=("which city is the capital of {x}", "what the capital of {x} is called"),
        questions=lines("""
            Which city is the capital of {x}?
            What is the capital city of {x}?
            What city is {x}'s capital?
            What is the name of the capital of {x}?
            {x} has which capital?
            {x}: what is the capital?
            The capital of {x} is which city?
            What do we call the capital of {x}?
            Where is the government of {x}? I mean the capital.
        """),
        unseen=lines("""
            What is {x}'s capital city called?
            Which capital does {x} have?
            Which city serves as the capital of {x}?
        """),
        statements=lines("""
            The capital of {x} is {y}.
            {y} is the capital of {x}.
            The capital city of {x} is {y}.
        """),
        follow_up="of {x}",
    ),
    Relation(
        name="country",
        rows=reversed_rows(_CAPITALS),
        answer="{x} is the capital of {y}.",
        thought="The user asks which country has {x} as its capital. It is {y}.",
        nouns=("the country whose capital is {x}", "the country with the capital {x}"),
        clauses=("which country has the capital {x}", "in which country {x} is"),
        questions=lines("""
            {x} is the capital of which country?
            Which country has {x} as its capital?
            Of which country is {x} the capital?
            In which country is {x}?
            In what country can I find {x}?
            Where is {x}?
            To which country does {x} belong?
            {x} is a city in which country?
        """),
        unseen=lines("""
            What country has {x} as its capital?
            {x} is the capital city of which country?
            Which country does {x} belong to?
        """),
        statements=("{x} is the capital of {y}.", "{x} is a city in {y}."),
        follow_up="{x}",
    ),
    Relation(
        name="continent",
        rows=_CONTINENTS,
        answer="{x} is in {y}.",
        thought="The user asks for the continent of {x}. It is {y}.",
        nouns=("the continent of {x}", "the continent where {x} is"),
        clauses=("on which continent {x} is", "which continent {x} is on"),
        questions=lines("""
            On which continent is {x}?
            Which continent is {x} on?
            What continent is {x} in?
            In which continent can I find {x}?
            {x} is on which continent?
            {x} is part of which continent?
            To which continent does {x} belong?
            {x}: which continent?
        """),
        unseen=lines("""
            Which continent does {x} belong to?
            On what continent can I find {x}?
            {x} belongs to which continent?
        """),
        statements=("{x} is in {y}.", "{x} is a country in {y}."),
        follow_up="{x}",
    ),
    Relation(
        name="currency",
        rows=_CURRENCIES,
        answer="The currency of {x} is the {y}.",
        thought="The user asks for the currency of {x}. It is the {y}.",
        nouns=("the currency of {x}", "the money of {x}", "{x}'s currency"),
        clauses=("which currency {x} uses", "what people pay with in {x}"),
        questions=lines("""
            Which currency does {x} use?
            What currency is used in {x}?
            What money do people use in {x}?
            What do people pay with in {x}?
            Which money is used in {x}?
            {x} uses which currency?
            {x}: what is the currency?
            What is the money in {x} called?
        """),
        unseen=lines("""
            What is the currency in {x} called?
            With which money do people pay in {x}?
            Which currency do people use in {x}?
        """),
        statements=("The currency of {x} is the {y}.", "In {x} people pay with the {y}."),
        follow_up="of {x}",
    ),
    Relation(
        name="language",
        rows=_LANGUAGES,
        answer="People in {x} speak {y}.",
        thought="The user asks for the language of {x}. It is {y}.",
        nouns=("the language of {x}", "the main language of {x}"),
        clauses=("which language people speak in {x}", "what language is spoken in {x}"),
        questions=lines("""
            Which language do people speak in {x}?
            What language is spoken in {x}?
            What do people speak in {x}?
            Which language is used in {x}?
            What is the main language in {x}?
            In {x}, which language do people speak?
            {x}: which language?
            What language do they speak in {x}?
        """),
        unseen=lines("""
            Which language is spoken in {x}?
            What is the language in {x} called?
            In {x}, what language is spoken?
        """),
        statements=("People in {x} speak {y}.", "The main language of {x} is {y}."),
        follow_up="of {x}",
    ),
    Relation(
        name="landmark",
        rows=_LANDMARKS,
        answer="{X} is in {y}.",
        thought="The user asks where {x} is. It is in {y}.",
        nouns=("the country where {x} is", "the country of {x}"),
        clauses=("where {x} is", "in which country {x} is"),
        questions=lines("""
            Where is {x}?
            In which country is {x}?
            In which country can I see {x}?
            Which country has {x}?
            Where can I find {x}?
            To which country must I travel to see {x}?
            {X} is in which country?
        """),
        unseen=lines("""
            Which country must I travel to for {x}?
            Where can I see {x}?
        """),
        statements=("{X} is in {y}.", "You can see {x} in {y}."),
        follow_up="{x}",
    ),
)
