"""Every change of one value of a JSON document."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator
from typing import Any

Json = Any
Place = tuple[str | int, ...]
"""Names and indices that lead to a value."""
OTHERS: list[Json] = [
    None, True, 0, 5, -1, 1.5, 2**70, "", "x", [], [5], ["x"], [[]], [{}], [None], {}, {"a": 1},
    {"type": "text", "text": "t"}, 2**31, 1e308,
]  # fmt: skip


def places_in(value: Json, at: Place = ()) -> Iterator[Place]:
    """Where the values of a document are, the document itself first."""
    yield at
    if isinstance(value, dict):
        for name in value:
            yield from places_in(value[name], (*at, name))
    elif isinstance(value, list):
        for i, item in enumerate(value):
            yield from places_in(item, (*at, i))


def changes_of(document: Json, others: Collection[str] = ()) -> Iterator[Json]:
    """The document with each of its values as something else or absent; then with something as the
    value of each of `others`, names that it need not have."""
    yield from OTHERS
    names = [(name,) for name in others if name not in document]
    for at in [*places_in(document), *names]:
        if not at:
            continue
        for other in OTHERS:
            made = copy.deepcopy(document)
            _owner(made, at)[at[-1]] = other
            yield made
        if at not in names:
            made = copy.deepcopy(document)
            del _owner(made, at)[at[-1]]
            yield made


def _owner(document: Json, at: Place) -> Json:
    for step in at[:-1]:
        document = document[step]
    return document
