"""Stories with a state: who is in them, what is lost, where it is found, how it ends.

Owns the casting of a plot and the telling of it. `tell` returns the text together with the
questions that this very text answers. Called by dialogues.py and grammar.py. The sentences
are in the plot files and the words in words.py; chat formatting is not done here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

import plots_friends
import plots_quests
import plots_things
from plot import Plot
from templates import choose, expand, fill
from words import (
    ANIMAL_HOMES,
    BOY_NAMES,
    COLOURS,
    FOODS,
    GIRL_NAMES,
    GLAD,
    HE,
    HELPERS,
    HOBBIES,
    PEOPLE_HOMES,
    PLACES,
    SAD,
    SCARED,
    SHE,
    SPOTS,
    TRAITS,
    WEATHER,
    Pronouns,
)

PLOTS = (*plots_things.PLOTS, *plots_friends.PLOTS, *plots_quests.PLOTS)

# Openings that set a scene first; the plot then starts on some day.
SCENES = (
    "Once upon a time, there was {a_trait} {kind} named {hero}.",
    "Once upon a time, there was {a_trait} little {kind} named {hero}.",
    "Once upon a time, {a_trait} {kind} named {hero} lived in {home}.",
    "Once upon a time, in {home}, there lived {a_trait} {kind} named {hero}.",
    "Once upon a time, there lived a little {kind} whose name was {hero}.",
    "There once was {a_trait} {kind} named {hero}, who lived in {home}.",
    "Long ago, {a_trait} little {kind} named {hero} lived in {home}.",
    "Not so long ago, there was {a_trait} {kind} named {hero}.",
    "Far away, in {home}, lived {a_trait} {kind} named {hero}.",
    "{hero} was {a_trait} little {kind} who lived in {home}.",
    "In {home}, there lived {a_trait} {kind} named {hero}.",
    "This is the story of {hero}, {a_trait} {kind}.",
)

# Openings in the middle of things; "One day" is then already taken.
MOMENTS = (
    "One day, a little {kind} named {hero} was [walking|playing|resting] {at_place0}.",
    "One day, {a_trait} {kind} named {hero} went to {place0}.",
    "One [sunny|windy|cold|quiet] day, {a_trait} {kind} named {hero} woke up very early.",
    "One morning, {a_trait} little {kind} named {hero} woke up in {home}.",
    "One day in [spring|summer|autumn], a little {kind} named {hero} looked up at the sky.",
    "It was a [sunny|windy|quiet|bright] day, and a little {kind} named {hero} was {at_place0}.",
)

SCENE_DETAILS = (
    "{He} loved to {hobby}.",
    "Every day, {he} liked to {hobby}.",
    "Most of all, {he} liked to {hobby}.",
    "{hero} was {trait} and loved to {hobby}.",
    "{He} lived in {home}.",
    "[Everyone|Everybody] liked {hero}, because {he} was so {trait}.",
)

MOMENT_DETAILS = (
    "{He} was {a_trait} {kind} who loved to {hobby}.",
    "{He} lived in {home} and loved to {hobby}.",
    "{He} was in a good mood.",
    "{hero} was always {trait}.",
)

CLOSINGS = ("The end.", "And that was the end of the story.", "And they all lived happily.")

NAME_STARTS = ("B", "D", "F", "G", "K", "L", "M", "N", "P", "R", "S", "T", "V", "Z", "Br", "Dr",
               "Fl", "Tr")  # fmt: skip
NAME_MIDDLES = ("l", "n", "r", "m", "d", "v", "z", "ll", "nn")

DAYS = (
    "One day", "One morning", "One afternoon", "One sunny morning", "One windy day",
    "One fine day", "One cold morning", "One day in spring", "One bright day", "One summer day",
)  # fmt: skip


@dataclass(frozen=True)
class Wish:
    """What somebody asked the story to contain; None means: anything."""

    kind: str | None = None
    name: str | None = None
    thing: str | None = None
    colour: str | None = None
    plot: Plot | None = None
    detail: float = 0.6
    """How likely an optional sentence is told."""


@dataclass(frozen=True)
class Story:
    """A told story, its plot slots, and the questions with their answers."""

    text: str
    slots: dict[str, str]
    questions: list[tuple[str, str]] = field(default_factory=list)


def pronouns_of(name: str) -> Pronouns:
    """Return the pronouns that go with a name, listed or invented."""
    return SHE if name in GIRL_NAMES or name.endswith("a") else HE


def random_kind(rng: Random) -> str:
    """Return the kind of being a character is: an animal, or a child."""
    return rng.choice(list(ANIMAL_HOMES)) if rng.random() < 0.65 else rng.choice(["girl", "boy"])


def random_name(rng: Random, kind: str) -> str:
    """Return a name that fits the kind."""
    if kind == "girl":
        return rng.choice(GIRL_NAMES)
    if kind == "boy":
        return rng.choice(BOY_NAMES)
    return rng.choice(rng.choice([GIRL_NAMES, BOY_NAMES]))


def invented_name(rng: Random, kind: str) -> str:
    """Return a name that is in no list, so that names in requests are learnt to be copied."""
    name = rng.choice(NAME_STARTS) + rng.choice("aeiou") + rng.choice(NAME_MIDDLES)
    if kind == "girl" or (kind != "boy" and rng.random() < 0.5):
        return name + rng.choice(("a", "ia", "ira"))
    return name + rng.choice(("o", "us", "in", "er"))


def _cast_hero(rng: Random, wish: Wish) -> dict[str, str]:
    kind = wish.kind
    if kind is None:
        kind = random_kind(rng)
        if wish.name is not None and kind in ("girl", "boy"):
            kind = "girl" if pronouns_of(wish.name) is SHE else "boy"
    name = wish.name or random_name(rng, kind)
    forms = pronouns_of(name)
    home = ANIMAL_HOMES.get(kind) or rng.choice(PEOPLE_HOMES)
    return {"hero": name, "kind": kind, "trait": rng.choice(TRAITS), "home": home,
            "hobby": rng.choice(HOBBIES), **forms._asdict()}  # fmt: skip


def _cast_friend(rng: Random, hero: dict[str, str]) -> dict[str, str]:
    # The friend differs in kind and mostly in gender, so that pronouns stay clear.
    opposite = BOY_NAMES if hero["he"] == "she" else GIRL_NAMES
    same = GIRL_NAMES if hero["he"] == "she" else BOY_NAMES
    name = rng.choice(opposite if rng.random() < 0.8 else same)
    while name == hero["hero"]:
        name = rng.choice(same)
    child = "girl" if pronouns_of(name) is SHE else "boy"
    kinds = [*ANIMAL_HOMES, child, child, child]
    kind = rng.choice([kind for kind in kinds if kind != hero["kind"]])
    trait = rng.choice([trait for trait in TRAITS if trait != hero["trait"]])
    slots = {"friend": name, "fkind": kind, "ftrait": trait}
    slots.update({f"f{form}": text for form, text in pronouns_of(name)._asdict().items()})
    return slots


def _choose_setting(rng: Random, plot: Plot, wish: Wish) -> dict[str, str]:
    thing = wish.thing or rng.choice(plot.things)
    colour = wish.colour or rng.choice(COLOURS)
    helper, forms = rng.choice(HELPERS)
    slots = {"thing": thing, "colour": colour, "obj": f"{colour} {thing}", "helper": helper,
             "hhe": forms.he, "hhim": forms.him, "hhis": forms.his,
             "food": rng.choice(FOODS), "sad": rng.choice(SAD), "glad": rng.choice(GLAD),
             "scared": rng.choice(SCARED), "weather": rng.choice(WEATHER)}  # fmt: skip
    for suffix, (preposition, noun) in zip(("", "2", "0"), rng.sample(PLACES, 3), strict=True):
        slots[f"place{suffix}"] = noun
        slots[f"at_place{suffix}"] = f"{preposition} {noun}"
    slots["spot"], slots["spot2"] = rng.sample(SPOTS, 2)
    return slots


def _make_picks(rng: Random, plot: Plot, slots: dict[str, str]) -> dict[str, str]:
    picks: dict[str, str] = {}
    for key, values in plot.picks.items():
        value = fill(rng.choice(values), slots)
        picks.update(zip(key.split("/"), value.split("/"), strict=True))
    return picks


def _opening(rng: Random, slots: dict[str, str], detail: float) -> str:
    in_the_moment = rng.random() < 0.3
    first = rng.choice(MOMENTS if in_the_moment else SCENES)
    slots["day"] = rng.choice(("That day", "That morning")) if in_the_moment else rng.choice(DAYS)
    slots["night"] = "That night" if in_the_moment else "One night"
    if "day," not in first and in_the_moment:
        slots["day"] = "That day"
    sentences = [first]
    told = first
    for extra in rng.sample(MOMENT_DETAILS if in_the_moment else SCENE_DETAILS, 2):
        repeated = any(slot in extra and slot in told for slot in ("{home}", "trait}", "{hobby}"))
        if not repeated and rng.random() < detail:
            sentences.append(extra)
            told += extra
    return " ".join(expand(rng, sentence, slots) for sentence in sentences)


def _paragraph(rng: Random, beats: tuple[str, ...], slots: dict[str, str], detail: float) -> str:
    told = [beat.removeprefix("?") for beat in beats
            if not beat.startswith("?") or rng.random() < detail]  # fmt: skip
    return " ".join(expand(rng, beat, slots) for beat in told)


GENERAL_FACTS = (
    ("Who is the story about?|Who is the main character?",
     "It is about {a_trait} {kind} named {hero}."),
    ("What is the name of the {kind}?|What is the {kind} called?",
     "The {kind} is called {hero}."),
    ("What was {hero}?|What kind of character is {hero}?", "{hero} was {a_kind}."),
    ("Where did {hero} live?", "{hero} lived in {home}."),
    ("What did {hero} love to do?|What did {hero} like to do?", "{hero} loved to {hobby}."),
    ("What was {friend}?|What kind of character is {friend}?", "{friend} was {a_fkind}."),
)  # fmt: skip


def _is_told(answer: str, text: str, slots: dict[str, str]) -> bool:
    # A fact may rest on an optional sentence: ask only about what this text says.
    names = [part.split("}")[0] for part in answer.split("{")[1:]]
    keys = [name.removeprefix("a_").removeprefix("the_") for name in names]
    return all(slots[key] in text for key in keys if key in slots)


def _questions(rng: Random, plot: Plot, text: str, slots: dict[str, str]) -> list[tuple[str, str]]:
    asked = []
    for question, answer in (*GENERAL_FACTS, *plot.facts):
        if _is_told(answer, text, slots):
            wording = rng.choice(question.split("|"))
            asked.append((fill(wording, slots), fill(answer, slots)))
    return asked


def _plot_for(rng: Random, wish: Wish) -> Plot:
    if wish.plot is not None:
        return wish.plot
    fitting = [plot for plot in PLOTS if plot is not plots_quests.JOURNEY and wish.thing is not None
               and wish.thing in plot.things]  # fmt: skip
    return rng.choice(fitting or PLOTS)


def tell(rng: Random, wish: Wish | None = None) -> Story:
    """Tell one story that fulfils the wish."""
    wish = wish or Wish()
    plot = _plot_for(rng, wish)
    slots = _cast_hero(rng, wish)
    slots.update(_cast_friend(rng, slots))
    slots.update(_choose_setting(rng, plot, wish))
    slots.update(_make_picks(rng, plot, slots))
    paragraphs = [_opening(rng, slots, wish.detail)]
    paragraphs += [_paragraph(rng, beats, slots, wish.detail) for beats in plot.paragraphs]
    text = "\n\n".join(paragraphs)
    questions = _questions(rng, plot, text, slots)
    if rng.random() < 0.1:
        text += "\n\n" + choose(rng, rng.choice(CLOSINGS))
    return Story(text, slots, questions)
