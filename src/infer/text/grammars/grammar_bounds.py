"""Numbers in JSON schemas that llguidance cannot represent, or only with a huge automaton.

It computes with integers of 64 bits and moves a bound beyond them to the nearest such integer. So a
`maximum` or a value below all of them crashes it by endless recursion, and a `minimum` above all of
them lets a smaller number through. A `multipleOf` is an automaton over the remainders: 400,000 take
2 s of CPU time, and those of schemas that hold for the same value multiply. Such a schema is
refused before it is compiled. A crash would end only a process that checks grammars, but the next
grammar would wait until another one has started.

`is_bound_enforceable` and its neighbours say of single keywords whether llguidance compiles them;
clients' schemas lose the others (`schema_relaxing`).
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
"""Keyword of a bound → 1 if no number is below it, -1 if none is above it."""
MAX_REMAINDERS = 500_000
"""Maximum number of remainders of `multipleOf` for one value, multiplied where several hold."""
_VALUES = {"const", "default", "enum", "examples"}
"""Keywords behind which there are values, not schemas."""
_FIXED_VALUES = ("const", "enum")
"""Those of them that are enforced."""
_MAX_DIGITS_ALONE = 10**17
"""Largest number up to which a bound is enforced where no other bound limits the digits."""
_MIN_FRACTION = 1e-60
"""Smallest bound of a number, below which there are too many zeros behind the point."""
_MAX_MULTIPLE, _MAX_ROUND_MULTIPLE = 100_000, 10**8
"""Largest digits of a `multipleOf` that is enforced, and of one that is round."""
_MIN_MULTIPLE = 1e-9
"""Smallest `multipleOf` that is enforced."""
_MAX_ROUND = 100
"""What is left of a round number without the zeros at its end is smaller; such numbers have small
automata."""
_SAME_VALUE = ("allOf", "anyOf", "oneOf", "not", "if", "then", "else")
"""Keywords whose schemas hold for the same value."""


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


def is_bound_enforceable(name: str, bound: Any, *, of_integer: bool) -> bool:
    """Whether llguidance compiles the keyword `name` of a bound with this value.

    Draft 4 has true beside another bound, which is no bound of its own. `of_integer`: whether it
    stands beside the type `integer`; a `maximum` beyond 64 bits is enforced as well as can be then.
    """
    if type(bound) not in (int, float):
        return isinstance(bound, bool)
    signed = _BOUNDS[name] * bound  # as if it were a `minimum`
    if of_integer and name in ("maximum", "exclusiveMaximum") and bound > 0:
        return True
    is_tiny = not of_integer and 0 < abs(bound) < _MIN_FRACTION
    return -_LIMIT + 1024 < signed <= _MAX_DIGITS_ALONE and not is_tiny


def is_multiple_enforceable(number: Any) -> bool:
    """Whether llguidance compiles a `multipleOf` of this value, and in a fraction of a second."""
    if type(number) not in (int, float) or not 0 < number < math.inf:
        return False
    digits = _digits_of(number)
    most = _MAX_ROUND_MULTIPLE if _without_zeros(digits) < _MAX_ROUND else _MAX_MULTIPLE
    return digits <= most and number >= _MIN_MULTIPLE


def is_value_enforceable(value: Any) -> bool:
    """Whether llguidance compiles a value of `const` or `enum`, which may hold others. Does not
    recurse."""
    stack = [value]
    while stack:
        part = stack.pop()
        if type(part) is int and part < -_LIMIT + 1024:
            return False
        stack += part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
    return True


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
            if not all(is_value_enforceable(node.get(name)) for name in _FIXED_VALUES):
                return "an integer of const or enum must be above -2**63"
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
        " (round numbers need fewer)"
    )


def _num_remainders(number: Any) -> int:
    """Remainders that a `multipleOf` has to tell apart; zeros at the end need none where little
    else is left, and below 1 there are few."""
    if type(number) not in (int, float) or not 1 <= number < math.inf:
        return 1
    digits = _digits_of(number)
    rest = _without_zeros(digits)
    return rest if rest < _MAX_ROUND else digits


def _digits_of(number: float) -> int:
    """The digits of a finite number without its point, as an integer."""
    _, digits, exponent = Decimal(str(number)).normalize().as_tuple()
    zeros = exponent if isinstance(exponent, int) and exponent > 0 else 0
    return int("".join(map(str, digits)) + "0" * zeros)


def _without_zeros(digits: int) -> int:
    while digits and digits % 10 == 0:
        digits //= 10
    return digits


class _Remainders:
    """The number of remainders that have to be told apart for the values of a schema's parts."""

    def __init__(self, schema: Any) -> None:
        self._schema = schema
        self._known: dict[int, int] = {}
        """By the id of a part; 1 while it is looked at, which ends cycles."""

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
