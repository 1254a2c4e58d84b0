"""Expansion of sentence templates.

Owns the small template language of the plots: `[a|b]` picks one alternative (they nest),
`{slot}` is a slot's value, `{Slot}` the value with a capital letter, `{a_slot}` or `{A_slot}`
the value with its article, and `{the_slot}` a value such as "a fish" made definite. Called by
stories.py and dialogues.py. It does not choose plots or know what the slots mean.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from random import Random

from words import with_article

# Innermost brackets only, so that repeated passes resolve nesting from the inside out.
_CHOICE = re.compile(r"\[([^\[\]]*)\]")
_SLOT = re.compile(r"\{(\w+)\}")


def capitalised(text: str) -> str:
    """Return the text with its first letter in upper case, the rest untouched."""
    return text[:1].upper() + text[1:]


def definite(phrase: str) -> str:
    """Return "the fish" for "a fish": a thing that was mentioned before."""
    for indefinite in ("a few ", "a bit of ", "a piece of ", "some ", "an ", "a "):
        if phrase.startswith(indefinite):
            return "the " + phrase.removeprefix(indefinite)
    return phrase


def choose(rng: Random, template: str) -> str:
    """Resolve every `[a|b]` in the template with the random generator."""
    while _CHOICE.search(template):
        template = _CHOICE.sub(lambda match: rng.choice(match.group(1).split("|")), template)
    return template


def _value(name: str, slots: Mapping[str, str]) -> str:
    if name in slots:
        return slots[name]
    lowered = name[:1].lower() + name[1:]
    if lowered in slots:
        return capitalised(slots[lowered])
    if lowered.startswith("a_") and lowered[2:] in slots:
        phrase = with_article(slots[lowered[2:]])
        return capitalised(phrase) if name.startswith("A") else phrase
    if lowered.startswith("the_") and lowered[4:] in slots:
        return definite(slots[lowered[4:]])
    raise KeyError(f"template slot {{{name}}} has no value; known slots: {sorted(slots)}")


def fill(template: str, slots: Mapping[str, str]) -> str:
    """Replace every slot in the template by its value."""
    return _SLOT.sub(lambda match: _value(match.group(1), slots), template)


def expand(rng: Random, template: str, slots: Mapping[str, str]) -> str:
    """Choose alternatives, then fill the slots."""
    return fill(choose(rng, template), slots)
