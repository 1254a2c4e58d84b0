"""Numbers in JSON schemas that llguidance cannot represent, or only with a huge automaton.

It computes with integers of 64 bits and moves a bound beyond them to the nearest such integer. So a
`maximum` below all of them crashes it by endless recursion, and a `minimum` above all of them lets
a smaller number through. A `multipleOf` is an automaton over the remainders: 400,000 take 2 s of
CPU time, and those of schemas that hold for the same value multiply. Such a schema is refused
before it is compiled. A crash would end only a process that checks grammars, but the next grammar
would wait until another one has started.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

from infer.text.grammars.grammar_depth import embedded_schemas, target_of
from infer.types.grammar import Grammar

_LIMIT = 2**63
_BOUNDS = {"minimum": 1, "exclusiveMinimum": 1, "maximum": -1, "exclusiveMaximum": -1}
"""keyword of a bound → 1 if no number is below it, -1 if none is above it"""
MAX_REMAINDERS = 500_000
"""Maximum number of remainders of `multipleOf` for one value, multiplied where several hold."""
_VALUES = {"const", "default", "enum", "examples"}
"""keywords behind which there are values, not schemas"""
_SAME_VALUE = ("allOf", "anyOf", "oneOf", "not", "if", "then", "else")
"""keywords whose schemas hold for the same value"""


def problem_of_bounds(grammar: Grammar) -> str:
    """Why the numbers in a grammar's schemas cannot be served, or ""."""
    try:
        if grammar.kind == "json":
            return _problem(json.loads(grammar.text))
        if grammar.kind in ("grammar", "calls"):
            sources = (grammar.rules, *grammar.texts)
            schemas = (schema for source in sources for schema in embedded_schemas(source))
            return next(filter(None, map(_problem, schemas)), "")
    except (ValueError, RecursionError):
        pass  # others say what is wrong with it
    return ""


def _problem(schema: Any) -> str:
    sizes = _Remainders(schema)
    stack = [schema]
    while stack:
        node = stack.pop()
        if isinstance(node, dict):
            for name in _BOUNDS.keys() & node.keys():
                bound, sign = node[name], _BOUNDS[name]
                # 2**63 - 1 counts as 2**63: llguidance reads a bound as a float first.
                if type(bound) in (int, float) and sign * bound >= _LIMIT - 512:
                    return f"{name} must be {'below 2**63' if sign > 0 else 'above -2**63'}"
            if (size := sizes.of(node)) > MAX_REMAINDERS:
                return _too_many(node.get("multipleOf"), size)
            stack += [value for name, value in node.items() if name not in _VALUES]
        elif isinstance(node, list):
            stack += node
    return ""


def _too_many(number: Any, size: int) -> str:
    what = f"multipleOf {number}" if size == _num_remainders(number) else "multipleOf of one value"
    return (
        f"{what} needs an automaton of {size:,} remainders; at most {MAX_REMAINDERS:,} are allowed"
        " (factors of 2 and 5 do not count)"
    )


def _num_remainders(number: Any) -> int:
    """Remainders that a `multipleOf` has to tell apart; the digits at the end tell factors of 2 and
    5, and below 1 there are few."""
    if type(number) not in (int, float) or not 1 <= number < math.inf:
        return 1
    size = int("".join(map(str, Decimal(str(number)).as_tuple().digits)))
    for factor in (2, 5):
        while size % factor == 0:
            size //= factor
    return size


class _Remainders:
    """The number of remainders that have to be told apart for the values of a schema's parts."""

    def __init__(self, schema: Any) -> None:
        self._schema = schema
        self._known: dict[int, int] = {}
        """by the id of a part; 1 while it is looked at, which ends cycles"""

    def of(self, node: Any) -> int:
        """The product of those of all schemas that hold for the same value as `node`, which stops
        when it is too large. Raises `RecursionError`."""
        if not isinstance(node, dict):
            return 1
        if id(node) not in self._known:
            self._known[id(node)] = 1
            size = _num_remainders(node.get("multipleOf"))
            for part in self._parts(node):
                if size > MAX_REMAINDERS:
                    break
                size *= self.of(part)
            self._known[id(node)] = size
        return self._known[id(node)]

    def _parts(self, node: dict[str, Any]) -> Iterator[Any]:
        for name in _SAME_VALUE:
            value = node.get(name)
            yield from value if isinstance(value, list) else [value]
        if "$ref" in node:
            yield target_of(self._schema, {}, node["$ref"])
