"""Bounds of integers in JSON schemas that llguidance cannot represent.

It computes with integers of 64 bits and moves a bound beyond them to the nearest such integer. So a
`maximum` below all of them crashes it by endless recursion, and a `minimum` above all of them lets
a smaller number through. Such a schema is refused before it is compiled. A crash would end only the
process that checks grammars, but everybody's next grammar waits until another one has started.
"""

from __future__ import annotations

import json
from typing import Any

from infer.text.grammars.grammar_depth import embedded_schemas
from infer.types.grammar import Grammar

_LIMIT = 2**63
_BOUNDS = {"minimum": 1, "exclusiveMinimum": 1, "maximum": -1, "exclusiveMaximum": -1}
"""keyword of a bound → 1 if no number is below it, -1 if none is above it"""


_VALUES = {"const", "default", "enum", "examples"}
"""keywords behind which there are values, not schemas"""


def problem_of_bounds(grammar: Grammar) -> str:
    """Why the bounds in a grammar's schemas cannot be served, or ""."""
    try:
        if grammar.kind == "json":
            return _problem(json.loads(grammar.text))
        if grammar.kind == "grammar":
            return next(filter(None, map(_problem, embedded_schemas(grammar.text))), "")
    except (ValueError, RecursionError):
        pass  # others say what is wrong with it
    return ""


def _problem(schema: Any) -> str:
    stack = [schema]
    while stack:
        node = stack.pop()
        if isinstance(node, dict):
            for name in _BOUNDS.keys() & node.keys():
                bound, sign = node[name], _BOUNDS[name]
                # 2**63 - 1 counts as 2**63: llguidance reads a bound as a float first.
                if type(bound) in (int, float) and sign * bound >= _LIMIT - 512:
                    return f"{name} must be {'below 2**63' if sign > 0 else 'above -2**63'}"
            stack += [value for name, value in node.items() if name not in _VALUES]
        elif isinstance(node, list):
            stack += node
    return ""
