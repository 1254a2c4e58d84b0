"""Word lists for the generated stories and chats.

Owns the vocabulary: who can appear, where things happen, what can be lost or found, and
the choice between "a" and "an". Called by stories.py, dialogues.py and exercises.py.
It knows nothing about sentences: those are in the plot files and expanded by templates.py.
"""

from __future__ import annotations

from typing import NamedTuple


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


class Pronouns(NamedTuple):
    """The forms of one third-person pronoun."""

    he: str
    him: str
    his: str
    himself: str


SHE = Pronouns("she", "her", "her", "herself")
HE = Pronouns("he", "him", "his", "himself")

GIRL_NAMES = _words(
    "Mia Anna Lily Rosa Nora Ella Ruby Clara Daisy Elsa Ivy Lucy Molly Tilly Zoe Maya Hazel "
    "Poppy Wren Flora Greta Luna Amy Nina Stella Holly Pearl Juno Tess Willa Bella Sofia"
)

BOY_NAMES = _words(
    "Tom Max Leo Finn Oscar Ben Sam Jack Theo Milo Hugo Felix Otto Pip Toby Noah Arlo Jasper "
    "Rufus Gus Bruno Ned Kip Charlie Henry Simon Barney Oliver Ravi Emil Robin Teddy"
)

# Each animal has the home it would really have, so that openings make sense.
ANIMAL_HOMES = {
    "fox": "a warm den under the hill",
    "rabbit": "a snug burrow beside the hedge",
    "mouse": "a tiny hole in an old stone wall",
    "bear": "a cosy cave in the hills",
    "hedgehog": "a soft nest of leaves",
    "squirrel": "a hollow oak tree",
    "frog": "a quiet pond full of lilies",
    "duck": "a nest of reeds beside the lake",
    "otter": "a small den on the river bank",
    "mole": "a long tunnel under the meadow",
    "beaver": "a house of sticks in the stream",
    "kitten": "a basket in the baker's kitchen",
    "puppy": "a red kennel on a farm",
    "lamb": "a green field near the village",
    "pony": "a wooden stable on a farm",
    "turtle": "a sandy burrow beside the pond",
    "badger": "a deep den in the woods",
    "goat": "a shed on the side of a mountain",
    "raccoon": "a hollow log near the creek",
    "pig": "a muddy yard behind the farmhouse",
}

PEOPLE_HOMES = (
    "a small house beside the river",
    "a village near the sea",
    "a cottage at the edge of the forest",
    "a tall house on a busy street",
    "a little town between two hills",
    "a white house with a blue door",
    "a farmhouse at the end of a long road",
    "an old mill outside the village",
)

TRAITS = _words(
    "brave shy curious kind clever cheerful gentle quiet playful patient careful dreamy lively "
    "friendly thoughtful hopeful polite honest eager merry"
)

HOBBIES = (
    "collect shiny stones",
    "sing little songs",
    "watch the clouds",
    "draw pictures in the sand",
    "listen to old stories",
    "count the stars",
    "dance in the rain",
    "explore new places",
    "smell the flowers",
    "make new friends",
    "jump over puddles",
    "chase butterflies",
    "bake little cakes",
    "look for feathers",
    "paint bright pictures",
    "tell funny jokes",
    "roll down the hill",
    "sleep in the sun",
    "ask a hundred questions",
    "play hide and seek",
)

COLOURS = _words("red blue green yellow orange purple pink white silver golden brown black")

THINGS = _words(
    "kite lantern ball bell key button scarf hat drum whistle book basket map feather shell "
    "stone marble ring coin ribbon umbrella spoon teapot blanket clock flute paintbrush mitten "
    "puppet bucket necklace balloon bottle box cup candle mirror compass"
)

# A place is the preposition used for being there, and the noun phrase.
PLACES = (
    ("in", "the forest"),
    ("by", "the river"),
    ("on", "the hill"),
    ("in", "the garden"),
    ("at", "the market"),
    ("near", "the old mill"),
    ("on", "the beach"),
    ("in", "the meadow"),
    ("by", "the pond"),
    ("behind", "the barn"),
    ("in", "the orchard"),
    ("near", "the stone bridge"),
    ("in", "the valley"),
    ("by", "the lake"),
    ("at", "the edge of the woods"),
    ("near", "the waterfall"),
    ("in", "the park"),
    ("by", "the windmill"),
    ("near", "the tall tower"),
    ("in", "the wheat field"),
)

SPOTS = (
    "under a pile of leaves",
    "behind a mossy rock",
    "inside a hollow log",
    "between the roots of an old tree",
    "in a patch of tall grass",
    "beneath a wooden bench",
    "on a low branch",
    "beside a small stream",
    "under a berry bush",
    "next to a broken fence",
    "on top of a flat stone",
    "behind a row of sunflowers",
    "inside an empty barrel",
    "in the middle of the path",
)

FOODS = (
    "warm soup",
    "apple pie",
    "honey cake",
    "fresh bread",
    "berry jam",
    "pumpkin soup",
    "carrot cake",
    "cherry pie",
    "hot porridge",
    "ginger cake",
    "nut bread",
    "plum pudding",
)

HELPERS = (
    ("old owl", SHE),
    ("old tortoise", HE),
    ("baker", HE),
    ("gardener", SHE),
    ("fisherman", HE),
    ("farmer", SHE),
    ("beekeeper", SHE),
    ("clockmaker", HE),
    ("shepherd", HE),
    ("grey goose", SHE),
    ("carpenter", SHE),
    ("postman", HE),
    ("wise crow", HE),
    ("miller", HE),
)

SCARED = _words("scared afraid nervous frightened")
SAD = _words("sad worried upset unhappy gloomy miserable")
GLAD = _words("happy proud glad joyful thankful cheerful relieved delighted")

WEATHER = (
    "The sun was warm and the sky was blue.",
    "A soft wind was blowing.",
    "The birds were singing in the trees.",
    "The air smelled of flowers.",
    "White clouds drifted across the sky.",
    "The morning dew was still on the grass.",
    "It was a bright and lovely day.",
    "The leaves were dancing in the wind.",
    "It had rained in the night, and everything was fresh and clean.",
)

# Words whose first letter misleads about their first sound.
_AN_EXCEPTIONS = ("honest", "hour")
_A_EXCEPTIONS = ("unicorn", "useful", "one")


def article(phrase: str) -> str:
    """Return "a" or "an", whichever the phrase needs."""
    lowered = phrase.lower()
    if lowered.startswith(_AN_EXCEPTIONS):
        return "an"
    if lowered.startswith(_A_EXCEPTIONS):
        return "a"
    return "an" if lowered[:1] in "aeiou" else "a"


def with_article(phrase: str) -> str:
    """Return the phrase with its indefinite article in front."""
    return f"{article(phrase)} {phrase}"
