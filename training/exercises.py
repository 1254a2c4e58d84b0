"""Exercises with one right answer: small arithmetic and short JSON records.

Owns the problems, their wordings and their answers, and which sums are never trained on
(so that accuracy on them means something). Called by dialogues.py for training and by
evaluate.py for measuring. It does not format chats.
"""

from __future__ import annotations

import json
from random import Random
from typing import NamedTuple

from words import ANIMAL_HOMES, BOY_NAMES, COLOURS, FOODS, GIRL_NAMES, HE, SHE, with_article


class Problem(NamedTuple):
    """A sum: two numbers and the sign between them."""

    left: int
    sign: str
    right: int

    @property
    def result(self) -> int:
        """The right answer."""
        if self.sign == "+":
            return self.left + self.right
        return self.left - self.right if self.sign == "-" else self.left * self.right

    @property
    def held_out(self) -> bool:
        """Whether this sum is kept out of training. The times table is learnt by heart."""
        return self.sign != "*" and (self.left * 131 + self.right * 29 + ord(self.sign)) % 20 == 0


WORDINGS = {
    "+": ("What is {a} + {b}?", "What is {a} plus {b}?", "{a} + {b} = ?", "Add {a} and {b}.",
          "Calculate {a} + {b}.", "How much is {a} plus {b}?", "Can you add {a} and {b}?",
          "{a}+{b}", "What is the sum of {a} and {b}?"),
    "-": ("What is {a} - {b}?", "What is {a} minus {b}?", "{a} - {b} = ?",
          "Subtract {b} from {a}.", "Calculate {a} - {b}.", "How much is {a} minus {b}?",
          "Take {b} away from {a}.", "{a}-{b}", "What is {a} take away {b}?"),
    "*": ("What is {a} * {b}?", "What is {a} times {b}?", "{a} * {b} = ?",
          "Multiply {a} by {b}.", "Calculate {a} * {b}.", "How much is {a} times {b}?",
          "{a} x {b}", "{a}*{b}"),
}  # fmt: skip

COUNTED = ("apples", "marbles", "shells", "cookies", "stones", "feathers", "buttons", "nuts")


def _draw(rng: Random) -> Problem:
    roll = rng.random()
    if roll < 0.45:
        limit = rng.choice((10, 20, 50, 100))
        left = rng.randint(0, limit)
        return Problem(left, "+", rng.randint(0, limit - left if rng.random() < 0.8 else limit))
    if roll < 0.85:
        left = rng.randint(0, rng.choice((10, 20, 50, 100)))
        return Problem(left, "-", rng.randint(0, left))
    return Problem(rng.randint(0, 10), "*", rng.randint(0, 10))


def draw_problem(rng: Random, held_out: bool = False) -> Problem:
    """Draw a sum from the training part, or from the part that is held out.

    No product is held out, so products are drawn from the whole times table either way.
    """
    problem = _draw(rng)
    sign = problem.sign
    while (held_out and problem.sign != sign) or (problem.held_out != held_out and sign != "*"):
        problem = _draw(rng)
        sign = sign if held_out else problem.sign
    return problem


def _word_problem(rng: Random, problem: Problem) -> tuple[str, str]:
    name = rng.choice(GIRL_NAMES + BOY_NAMES)
    forms = SHE if name in GIRL_NAMES else HE
    a, b, result, counted = problem.left, problem.right, problem.result, rng.choice(COUNTED)
    event = f"gets {b} more" if problem.sign == "+" else f"gives away {b}"
    question = f"{name} has {a} {counted} and {event}. How many {counted} does {forms.he} have now?"
    return question, f"{a} {problem.sign} {b} = {result}, so {name} has {result} {counted}."


def pose(rng: Random, problem: Problem) -> tuple[str, str]:
    """Return a question that asks for the sum, and its answer."""
    plain = problem.sign == "*" or min(problem.left, problem.right) < 2 or problem.result < 2
    if not plain and rng.random() < 0.15:
        return _word_problem(rng, problem)
    question = rng.choice(WORDINGS[problem.sign]).format(a=problem.left, b=problem.right)
    return question, f"{problem.left} {problem.sign} {problem.right} = {problem.result}"


CITIES = (
    "Rome", "Paris", "Berlin", "Oslo", "Madrid", "Vienna", "Lisbon", "London", "Dublin",
    "Prague",
)  # fmt: skip
COUNTRIES = {"Rome": "Italy", "Paris": "France", "Berlin": "Germany", "Oslo": "Norway",
             "Madrid": "Spain", "Vienna": "Austria", "Lisbon": "Portugal", "London": "England",
             "Dublin": "Ireland", "Prague": "Czechia"}  # fmt: skip
JOBS = (
    "teacher", "baker", "farmer", "doctor", "painter", "sailor", "gardener", "carpenter",
    "nurse", "cook",
)  # fmt: skip
PET_LIKES = (
    "milk", "naps", "fish", "sunshine", "balls", "bones", "walks", "music", "games", "carrots",
)  # fmt: skip
GENRES = ("adventure", "mystery", "fantasy", "history", "poetry", "comedy")  # fmt: skip
CAR_MAKES = ("Falcon", "Comet", "Arrow", "Meteor", "Panther", "Swift")  # fmt: skip
FRUITS = {"apple": "red", "banana": "yellow", "plum": "purple", "orange": "orange",
          "pear": "green", "cherry": "red", "lemon": "yellow", "lime": "green"}  # fmt: skip

Record = dict[str, object]


def _pet(rng: Random, kind: str, name: str) -> Record:
    return {"kind": kind, "name": name, "age": rng.randint(1, 15), "colour": rng.choice(COLOURS),
            "likes": rng.sample(PET_LIKES, rng.randint(1, 3))}  # fmt: skip


def _person(rng: Random, name: str) -> Record:
    return {"name": name, "age": rng.randint(6, 90), "city": rng.choice(CITIES),
            "job": rng.choice(JOBS), "married": rng.random() < 0.5}  # fmt: skip


def _book(rng: Random, name: str) -> Record:
    title = f"The {rng.choice(COLOURS).title()} {rng.choice(list(ANIMAL_HOMES)).title()}"
    return {"title": title, "author": name, "year": rng.randint(1900, 2020),
            "genre": rng.choice(GENRES), "pages": rng.randint(40, 600)}  # fmt: skip


def _city(rng: Random) -> Record:
    city = rng.choice(CITIES)
    return {"name": city, "country": COUNTRIES[city], "river": rng.random() < 0.7}


def _car(rng: Random) -> Record:
    return {"make": rng.choice(CAR_MAKES), "colour": rng.choice(COLOURS),
            "doors": rng.choice((3, 5)), "electric": rng.random() < 0.5}  # fmt: skip


def _fruit(rng: Random) -> Record:
    fruit = rng.choice(list(FRUITS))
    return {"name": fruit, "colour": FRUITS[fruit], "price": rng.randint(1, 9)}


def _recipe(rng: Random) -> Record:
    foods = ("flour", "butter", "sugar", "eggs", "milk", "salt", "apples", "honey")
    return {"title": rng.choice(FOODS), "minutes": rng.randint(2, 18) * 5,
            "ingredients": rng.sample(foods, rng.randint(2, 4))}  # fmt: skip


REQUESTS = (
    "Give me a JSON record of {what}.", "Write a JSON record for {what}.",
    "Write a JSON object that describes {what}.", "Describe {what} as JSON.",
    "Make a JSON record of {what}, please.", "Reply with JSON only: {what}.",
    "Please give me {what} as a JSON object.", "I need a JSON record of {what}.",
)  # fmt: skip


def _record(rng: Random) -> tuple[str, Record]:
    name = rng.choice(GIRL_NAMES + BOY_NAMES)
    subject = rng.choice(("pet", "pet", "pet", "person", "person", "book", "city", "car",
                          "fruit", "recipe"))  # fmt: skip
    named = f" named {name}" if rng.random() < 0.5 else ""
    if subject == "pet":
        kind = rng.choice(("cat", "dog", "bird", "horse", "cat", *ANIMAL_HOMES))
        return with_article(kind) + named, _pet(rng, kind, name)
    if subject == "person":
        return f"a person{named}", _person(rng, name)
    if subject == "book":
        return f"a book{f' by {name}' if named else ''}", _book(rng, name)
    makers = {"city": _city, "car": _car, "fruit": _fruit, "recipe": _recipe}
    return f"a {subject}", makers[subject](rng)


def json_exercise(rng: Random) -> tuple[str, str]:
    """Return a request for a JSON record, and the record as text."""
    what, record = _record(rng)
    request = rng.choice(REQUESTS).format(what=what)
    wanted = ""
    if rng.random() < 0.25:
        keys = rng.sample(list(record), rng.randint(2, len(record)))
        record = {key: record[key] for key in keys}
        wanted = f" Use the fields {', '.join(keys[:-1])} and {keys[-1]}."
    indented = rng.random() < 0.15
    layout = rng.choice((" Indent it.", " Use indentation.")) if indented else ""
    return request + wanted + layout, json.dumps(record, indent=2 if indented else None)
