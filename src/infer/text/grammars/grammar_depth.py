"""The nesting depth of a grammar: references between rules, `$ref`s, nested schemas, brackets.

Compilers of grammars recurse, and a compiler that recurses too deeply crashes its process. So the
depth is found here first, without recursion and in time linear in the text. The depth may be
overestimated: a rule's name inside a string counts as a reference, since the syntax of strings
depends on the grammar's dialect. A cycle of references counts once. Counting ends as soon as there
are too many levels, so that a refusal is cheap.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import unquote

from infer.types.grammar import Grammar

MAX_DEPTH = 500
"""Maximum number of levels."""
TOO_DEEP = f"it is nested too deeply: at most {MAX_DEPTH} levels of rules, references and brackets"

_NAME = re.compile(r"[A-Za-z_][\w-]*")
# `name:`, `?name.1[lazy]:`, `name{a, b}:`, `name::_ :` and `name ::=`
_RULE = re.compile(
    r"(?<![\w-])([A-Za-z_][\w-]*)(?:\.-?\d+)?(?:\[[^\[\]\n]*\])?(?:\{[^{}\n]*\})?(?:::\w+)?\s*:"
)
_MAX_BROKEN = 16
"""Maximum number of malformed schemas in a grammar; no further schema is read after them."""
_BRACKET = re.compile(r"[()\[\]{}]")


def is_too_deep(grammar: Grammar) -> bool:
    """Whether a grammar has more than `MAX_DEPTH` levels; False for one that is not valid."""
    if grammar.kind == "json":
        try:
            return schema_depth(json.loads(grammar.text)) > MAX_DEPTH
        except RecursionError:
            return True
        except ValueError:
            return False
    if grammar.kind in ("grammar", "calls"):
        sources = (grammar.rules, *grammar.texts)
        return sum(map(_grammar_depth, sources)) > MAX_DEPTH
    return False


def schema_depth(schema: Any) -> int:
    """The number of levels of a JSON schema's objects; above `MAX_DEPTH`, some larger number.

    The targets of `$ref`s are levels; an object that is a `$ref` itself is not.
    """
    if not isinstance(schema, dict | list):
        return 0
    nodes = nodes_of(schema)
    anchors = anchors_in(nodes)

    def next_of(node: Any) -> Iterable[Any]:
        values = node.values() if isinstance(node, dict) else node
        yield from (value for value in values if isinstance(value, dict | list))
        if isinstance(node, dict):
            for key in ("$ref", "$dynamicRef", "$recursiveRef"):
                target = target_of(schema, anchors, node.get(key))
                if isinstance(target, dict | list):
                    yield target

    return _longest(
        nodes,
        next_of,
        lambda node: int(isinstance(node, dict) and "$ref" not in node),
        key=id,
    )


def nodes_of(schema: Any) -> list[Any]:
    """All objects and lists in a schema, itself included."""
    nodes: list[Any] = []
    stack: list[Any] = [schema]
    while stack:
        node = stack.pop()
        nodes.append(node)
        children = node.values() if isinstance(node, dict) else node
        stack += [child for child in children if isinstance(child, dict | list)]
    return nodes


def anchors_in(nodes: Iterable[Any]) -> dict[str, Any]:
    """The objects that have a name for references, by that name."""
    anchors: dict[str, Any] = {}
    for node in nodes:
        if isinstance(node, dict):
            for key in ("$anchor", "$dynamicAnchor", "$id", "id"):
                if isinstance(name := node.get(key), str):
                    # `#name` as an id is an anchor, up to draft 7
                    anchors.setdefault(name.removesuffix("#").removeprefix("#"), node)
    return anchors


def target_of(schema: Any, anchors: Mapping[str, Any], reference: Any) -> Any:
    """The target of a reference; None if it is not in this schema."""
    if not isinstance(reference, str):
        return None
    base, _, fragment = reference.partition("#")
    node = anchors.get(base, schema if not base else None)
    if fragment and not fragment.startswith("/"):
        return anchors.get(fragment)
    for part in fragment.split("/")[1:]:
        name = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(node, dict):
            node = node.get(name)
        elif isinstance(node, list) and name.isdecimal() and len(name) < 9:
            node = node[int(name)] if int(name) < len(node) else None
        else:
            return None
    return node


def _grammar_depth(text: str) -> int:
    depth = 0
    for bracket in _BRACKET.findall(text):
        depth = depth + 1 if bracket in "([{" else max(0, depth - 1)
        if depth > MAX_DEPTH:
            return depth
    return max(_rule_depth(text), _embedded_depth(text))


def embedded_schemas(text: str) -> Iterator[Any]:
    """The JSON schemas in a grammar, without malformed ones; raises `RecursionError`."""
    num_broken = 0
    for match in re.finditer(r"%json\s*(?=[{\[])", text):
        try:
            schema, _ = json.JSONDecoder().raw_decode(text, match.end())
        except ValueError:
            num_broken += 1
            if num_broken > _MAX_BROKEN:  # parsing each may take time linear in the text
                break
            continue
        yield schema


def _embedded_depth(text: str) -> int:
    """Of the schemas in a grammar."""
    try:
        return max(map(schema_depth, embedded_schemas(text)), default=0)
    except RecursionError:
        return MAX_DEPTH + 1


def _rule_depth(text: str) -> int:
    rules = list(_RULE.finditer(text))
    if len(rules) <= MAX_DEPTH:  # a chain of references has each rule at most once
        return 0
    bodies: dict[str, list[tuple[int, int]]] = {}
    ends = [*(rule.start() for rule in rules[1:]), len(text)]
    for rule, end in zip(rules, ends, strict=True):
        bodies.setdefault(rule[1], []).append((rule.end(), end))

    def used_by(rule: str) -> Iterable[str]:
        names = (name for body in bodies[rule] for name in _NAME.findall(text, *body))
        return dict.fromkeys(name for name in names if name in bodies)

    return _longest(bodies, used_by, lambda name: 1, key=lambda name: name)


def _longest(
    nodes: Iterable[Any],
    next_of: Callable[[Any], Iterable[Any]],
    weight: Callable[[Any], int],
    key: Callable[[Any], Any],
) -> int:
    """The weight of the heaviest path in a graph; above `MAX_DEPTH`, the first such path found.

    A path ends at a node that it already has. `key(node)` identifies a node. The search is
    depth-first, without recursion.
    """
    depths: dict[Any, int] = {}
    """Weight of the heaviest path from each node that is done; 0 for nodes on the current path."""
    longest = 0
    for start in nodes:
        if key(start) in depths:
            continue
        depths[key(start)] = 0
        stack = [(start, iter(next_of(start)), [0])]
        height = weight(start)  # weight of the current path; in cycles it may exceed `depths`
        while stack:
            node, following, best = stack[-1]
            longest = max(longest, height)
            if longest > MAX_DEPTH:
                return longest
            child = next(following, None)
            if child is None:
                stack.pop()
                height -= weight(node)
                depths[key(node)] = weight(node) + best[0]
                longest = max(longest, depths[key(node)])
                if stack:
                    above = stack[-1][2]
                    above[0] = max(above[0], depths[key(node)])
            elif key(child) in depths:
                best[0] = max(best[0], depths[key(child)])
            else:
                depths[key(child)] = 0
                stack.append((child, iter(next_of(child)), [0]))
                height += weight(child)
    return longest
