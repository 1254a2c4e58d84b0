"""`relaxed`: a JSON schema without what the compiler of grammars cannot enforce."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from infer.text.grammars.grammar_bounds import (
    is_bound_enforceable,
    is_multiple_enforceable,
    is_value_enforceable,
)
from infer.text.grammars.grammar_depth import anchors_in, nodes_of, target_of
from infer.text.grammars.patterns import is_enforceable
from infer.text.grammars.schema_circles import asserted, circular, leads_back, members

FORMATS = frozenset(
    ("date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid",
     "unknown")
)  # fmt: skip
"""Formats of strings that are enforced."""
DROPPED: Mapping[str, Callable[[Any], bool]] = {
    "$dynamicRef": lambda value: False,
    "$recursiveRef": lambda value: False,
    "$recursiveAnchor": lambda value: True,
    "contains": lambda value: False,
    "dependencies": lambda value: not value,
    "dependentRequired": lambda value: not value,
    "dependentSchemas": lambda value: not value,
    "else": lambda value: value in (True, {}),
    "if": lambda value: True,
    "maxContains": lambda value: True,
    "minContains": lambda value: True,
    "not": lambda value: value is False,
    "propertyNames": lambda value: value in (True, {}),
    "then": lambda value: value in (True, {}),
    "unevaluatedItems": lambda value: value in (True, {}),
    "unevaluatedProperties": lambda value: value in (True, {}),
    "uniqueItems": lambda value: value is not True,
}
"""Keywords that are dropped, each with whether a value forbids nothing by itself."""
_TYPES = frozenset(("array", "boolean", "integer", "null", "number", "object", "string"))
_DIALECTS = frozenset(
    ("http://json-schema.org/draft-04/schema", "http://json-schema.org/draft-06/schema",
     "http://json-schema.org/draft-07/schema", "https://json-schema.org/draft/2019-09/schema",
     "https://json-schema.org/draft/2020-12/schema")
)  # fmt: skip
_URI = re.compile(
    r"[A-Za-z][\w+.-]*:(//[\w.-]*(:\d+)?(?=[/?#]|$)|(?!//))[^\s<>{}|\\^`[\]#]*#?"
    r"|(?!//)[^\s:<>{}|\\^`[\]#]*#?",
    re.ASCII,
)
_ANYTHING = frozenset(("", "^", "$", ".*", "^.*", ".*$", "^.*$", ".+", "^.+", ".+$", "^.+$"))
_PREFIX = re.compile(r"\^[\w-]+")
_SCHEMA_MAPS = ("properties", "patternProperties")
_SCHEMA_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_SCHEMAS = ("additionalProperties", "additionalItems", "items")
_JOINING = ("allOf", "anyOf", "oneOf", "$ref")
_COUNTS = (
    "minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties",
)  # fmt: skip
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_SAYING = frozenset(
    ("$ref", "const", "enum", "format", "multipleOf", "pattern", "required", "type", *_BOUNDS,
     *_COUNTS, *_SCHEMA_LISTS, *_SCHEMA_MAPS, *_SCHEMAS)
)  # fmt: skip
"""Keywords that forbid something; all others are notes."""
_PLAIN = frozenset(("type", "title", "description", "default", "examples"))
"""Keywords of a part of which nothing is dropped, and which has no parts of its own."""
_MOST = {"maxLength": 100_000, "minLength": 10**9}
"""Largest lengths that are enforced."""
MAX_NAMED = 1000
"""Maximum number of dropped keywords that are returned."""
_MAX_SHOWN_CHARS = 64

_Path = tuple[Any, Any] | None
"""(path of the parent, key or index); None: the schema itself."""


class DroppedKeywords(NamedTuple):
    """A keyword that is not enforced."""

    path: str
    """Where its schema is, from the whole schema: "" or `.properties.v.items`."""
    keyword: str
    """The keyword, and its value if that is short: `format 'path'`."""


class Relaxed(NamedTuple):
    """A schema without what cannot be enforced."""

    schema: Any
    """The schema; the given one itself if nothing had to be changed."""
    dropped: tuple[DroppedKeywords, ...]
    """What it has lost, up to `MAX_NAMED`."""


def relaxed(schema: Any) -> Relaxed:
    """The schema, and what had to be dropped.

    Callers pass on schemas that they have not written. llguidance refuses a whole schema for one
    keyword, format or expression that it does not know. A schema only forbids, so without a keyword
    it allows more, and whatever is left is still enforced. `relaxed` drops such keywords and says
    which.

    Everything that could turn this around is dropped as a whole, with the schemas inside it: `not`,
    `if`, `contains`, `propertyNames`, `dependentSchemas`. `oneOf` is compiled as `anyOf`. Without
    one of its `patternProperties` a schema would allow less if `additionalProperties` restricted
    those properties, so that is dropped with it. Only schemas that take part are looked at: those
    inside `$defs` if a `$ref` leads to them. The work is linear in the schema's size and does not
    recurse. Nothing is raised.

    A schema that is nested too deeply is returned as it is: others refuse it.
    """
    if not isinstance(schema, dict):
        return Relaxed(schema, ())
    try:
        work = _Relaxing(json.loads(json.dumps(schema)))
    except (ValueError, TypeError, RecursionError):
        return Relaxed(schema, ())
    work.run()
    return Relaxed(work.root if work.has_changed else schema, tuple(work.dropped))


class _Relaxing:
    """Changes one schema, which is a copy."""

    def __init__(self, root: dict[str, Any]) -> None:
        self.root = root
        self.dropped: list[DroppedKeywords] = []
        self.has_changed = False
        nodes = nodes_of(root)
        self._anchors = anchors_in(nodes)
        references = [node["$ref"] for node in nodes if isinstance(node, dict) and "$ref" in node]
        self._has_references = bool(references)
        self._has_distant_references = not all(
            str(reference).startswith("#") for reference in references
        )
        self._has_named_references = not all(
            str(reference).startswith("#/") for reference in references
        )
        self._stack: list[tuple[dict[str, Any], _Path, bool]] = [(root, None, False)]
        self._references: list[tuple[dict[str, Any], _Path]] = []
        self._visited: list[tuple[dict[str, Any], _Path]] = []
        self._loops: dict[int, bool] = {}
        """Whether a reference means only itself, by the ids of nodes that were asked."""

    def run(self) -> None:
        seen = set[int]()
        while self._stack:
            node, path, is_joined = self._stack.pop()
            if id(node) in seen:
                continue
            seen.add(id(node))
            self._visited.append((node, path))
            if _is_plain(node):
                continue
            self._drop_unknown(node, path)
            self._drop_malformed(node, path)
            self._relax_numbers(node, path)
            self._relax_properties(node, path, is_joined)
            self._relax_identity(node, path)
            self._visit_inside(node, path)
        self._open_circles()
        for node, path in self._references:  # their targets may have been dropped meanwhile
            if "$ref" in node and (self._target(node) is None or self._means_itself(node)):
                self._drop(node, path, "$ref")

    def _drop(
        self, node: dict[str, Any], path: _Path, name: str, *, silently: bool = False
    ) -> None:
        value = node.pop(name)
        self.has_changed = True
        if not silently:
            self._name(path, name, value)

    def _name(self, path: _Path, keyword: str, value: Any) -> None:
        self.has_changed = True
        if len(self.dropped) < MAX_NAMED:
            if isinstance(value, str):
                keyword = f"{keyword} {value[:_MAX_SHOWN_CHARS]!r}"
            elif type(value) in (int, float):
                keyword = f"{keyword} {value}"
            self.dropped.append(DroppedKeywords(_spelled(path), keyword))

    def _drop_unknown(self, node: dict[str, Any], path: _Path) -> None:
        if "if" in node and node.keys() & {"then", "else"}:
            self._drop(node, path, "if")
        for name in [name for name in node if name in DROPPED]:
            self._drop(node, path, name, silently=DROPPED[name](node[name]))
        kind = node.get("format")
        if "format" in node and (not isinstance(kind, str) or kind not in FORMATS):
            types = node.get("type", "string")
            if not isinstance(kind, str) or types == "string" or "string" in types:
                self._drop(node, path, "format")
        pattern = node.get("pattern")
        if "pattern" in node and not (isinstance(pattern, str) and is_enforceable(pattern)):
            self._drop(node, path, "pattern")

    def _drop_malformed(self, node: dict[str, Any], path: _Path) -> None:
        """Drop keywords whose values no draft of JSON Schema allows."""
        for name in _COUNTS:
            value = node.get(name)
            if isinstance(value, float) and value.is_integer():
                node[name] = value = int(value)
                self.has_changed = True
            is_count = type(value) is int and value >= 0
            if is_count and name in _MOST:
                is_count = node[name] <= _MOST[name]
            if name in node and not is_count:
                self._drop(node, path, name)
        types = node.get("type", "string")
        names = types if isinstance(types, list) else [types]
        if not names or not all(isinstance(name, str) and name in _TYPES for name in names):
            self._drop(node, path, "type")
        for name in ("enum", "required", *_SCHEMA_LISTS):
            is_empty = name in ("anyOf", "oneOf") and node.get(name) == []
            if name in node and (is_empty or not isinstance(node[name], list)):
                self._drop(node, path, name)
        if not all(isinstance(name, str) for name in node.get("required", ())):
            self._drop(node, path, "required")
        for name in _SCHEMA_MAPS:
            if name in node and not isinstance(node[name], dict):
                self._drop(node, path, name)
        for name in _SCHEMAS:
            is_schema = isinstance(node.get(name), dict | bool)
            is_tuple = name == "items" and isinstance(node.get(name), list)
            if name in node and not is_schema and not is_tuple:
                self._drop(node, path, name)

    def _relax_numbers(self, node: dict[str, Any], path: _Path) -> None:
        """Drop numbers that llguidance cannot represent, such as bounds of 64 bits."""
        types = node.get("type")
        names = types if isinstance(types, list) else [types]
        of_integer = "integer" in names and "number" not in names
        for name in _BOUNDS:
            if name in node and not is_bound_enforceable(name, node[name], of_integer=of_integer):
                self._drop(node, path, name)
        if "multipleOf" in node and not is_multiple_enforceable(node["multipleOf"]):
            self._drop(node, path, "multipleOf")
        for name in ("const", "enum"):
            if name in node and not is_value_enforceable(node[name]):
                self._drop(node, path, name)

    def _relax_properties(self, node: dict[str, Any], path: _Path, is_joined: bool) -> None:
        patterns = node.get("patternProperties", {})
        refused = [pattern for pattern in patterns if not is_enforceable(pattern)]
        for pattern in refused:
            del patterns[pattern]
            self._name(path, "patternProperties", pattern)
        overlap = _overlap(list(patterns))
        if overlap:  # llguidance takes disjoint expressions only
            self._drop(node, path, "patternProperties")
        if (refused or overlap) and node.get("additionalProperties", True) not in (True, {}):
            self._drop(node, path, "additionalProperties")
        # llguidance counts properties only where none of those that it knows is optional.
        if is_joined or self._has_references or any(name in node for name in _JOINING):
            is_countable = False
        else:
            is_countable = node.get("properties", {}).keys() <= set(node.get("required", ()))
        if not is_countable:
            for name in ("minProperties", "maxProperties"):
                if name in node:
                    self._drop(
                        node, path, name, silently=name == "minProperties" and not node[name]
                    )

    def _relax_identity(self, node: dict[str, Any], path: _Path) -> None:
        """Names of schemas and references to them."""
        dialect = node.get("$schema")
        is_known = isinstance(dialect, str) and dialect.removesuffix("#") in _DIALECTS
        # To llguidance, dialects up to draft 7 have no anchors.
        if "$schema" in node and (not is_known or self._has_named_references):
            self._drop(node, path, "$schema", silently=True)
        for name in ("$id", "id"):
            value = node.get(name)
            if not isinstance(value, str):
                continue
            if value.startswith("#"):  # an anchor, up to draft 7
                node.setdefault("$anchor", value[1:])
            if not self._has_distant_references or not _URI.fullmatch(value):
                self._drop(node, path, name, silently=True)
        if "$dynamicAnchor" in node:  # an anchor too, for a `$ref`
            anchor = node.pop("$dynamicAnchor")
            node.setdefault("$anchor", anchor)
            self.has_changed = True
        if "$ref" not in node:
            return
        target = self._target(node)
        if target is None:
            self._drop(node, path, "$ref")
        else:
            self._references.append((node, path))
            if isinstance(target, dict):
                self._stack.append((target, _path_of(node["$ref"]), True))

    def _open_circles(self) -> None:
        """Leave bare what refers to a schema around it: first without notes, then the nodes that
        refer themselves, then those of which a member does."""
        if not self._has_references:
            return
        paths = {id(node): path for node, path in self._visited}
        nodes = [node for node, _ in self._visited]
        for turn in ("notes", "references", "lists"):
            back, circle_of = circular(nodes, _inside, self._target)
            if not back:
                return
            for node in back:
                self._open_circle(node, paths[id(node)], circle_of, turn)

    def _open_circle(
        self, node: dict[str, Any], path: _Path, circle_of: Mapping[int, int], turn: str
    ) -> None:
        kept, index = "$ref", 0
        if "$ref" not in node:
            circle = circle_of[id(node)]
            referring = (
                (name, i)
                for name, i, member in members(node)
                if leads_back(member, circle_of, circle, self._target)
            )
            kept, index = next(referring, ("allOf", 0))
        is_due = turn == "lists" or (turn == "references" and kept == "$ref")
        for name in asserted(node):
            is_note = name not in _SAYING
            if is_note or (name != kept and is_due):
                self._drop(node, path, name, silently=is_note)
        if is_due and kept == "allOf":
            self._keep_member(node, path, index)

    def _keep_member(self, node: dict[str, Any], path: _Path, kept: int) -> None:
        for i in range(len(node["allOf"])):
            if i != kept:
                self._name((path, "allOf"), f"[{i}]", None)
        node["allOf"] = [node["allOf"][kept]]

    def _means_itself(self, node: dict[str, Any]) -> bool:
        """Whether a reference leads back to itself over references alone, and so says nothing."""
        seen = list[int]()
        verdict = None
        while verdict is None:
            seen.append(id(node))
            self._loops[id(node)] = True  # if it is met again
            meant = self._target(node) if "$ref" in node else _only_member(node)
            if isinstance(meant, dict):
                verdict, node = self._loops.get(id(meant)), meant
            else:
                verdict = False
        self._loops |= dict.fromkeys(seen, verdict)
        return verdict

    def _target(self, node: dict[str, Any]) -> Any:
        """The schema that a `$ref` means; None if it is not in this schema."""
        target = target_of(self.root, self._anchors, node.get("$ref"))
        return target if isinstance(target, dict | bool) else None

    def _visit_inside(self, node: dict[str, Any], path: _Path) -> None:
        for name in (*_SCHEMA_MAPS, *_SCHEMA_LISTS, *_SCHEMAS):
            inside: Any = node.get(name)
            if name in _SCHEMAS and not isinstance(inside, list):
                if isinstance(inside, dict):
                    self._stack.append((inside, (path, name), False))
                continue
            members = inside.items() if isinstance(inside, dict) else enumerate(inside or ())
            for key, member in list(members):
                where = ((path, name), key)
                if isinstance(member, dict):
                    self._stack.append((member, where, name in _JOINING))
                elif not isinstance(member, bool):
                    inside[key] = True
                    self._name(where, "schema", member)


def _is_plain(node: dict[str, Any]) -> bool:
    """Whether a schema, as most of a large one, has a type and notes only: all of it is kept."""
    kind = node.get("type")
    return isinstance(kind, str) and kind in _TYPES and node.keys() <= _PLAIN


def _inside(node: dict[str, Any]) -> list[Any]:
    """The schemas within a schema, without those that a `$ref` means."""
    schemas = list[Any]()
    for name in (*_SCHEMA_MAPS, *_SCHEMA_LISTS, *_SCHEMAS):
        inside = node.get(name)
        if isinstance(inside, dict) and name in _SCHEMA_MAPS:
            schemas += inside.values()
        else:
            schemas += inside if isinstance(inside, list) else [inside]
    return schemas


def _only_member(node: dict[str, Any]) -> Any:
    """The schema that is all that a node says; None if it says more."""
    lists = [node[name] for name in _SCHEMA_LISTS if isinstance(node.get(name), list)]
    return lists[0][0] if len(lists) == 1 and len(lists[0]) == 1 else None


def _overlap(patterns: list[str]) -> bool:
    """Whether a name can match two of the expressions, as far as that can be seen."""
    if len(patterns) < 2:
        return False
    if any(pattern in _ANYTHING for pattern in patterns):
        return True
    open_ends = [pattern for pattern in patterns if "$" not in pattern and "\\z" not in pattern]
    if any("^" not in pattern and "\\A" not in pattern for pattern in open_ends):
        return len(open_ends) > 1
    # Sorted, a prefix comes directly before a longer one or before another that has it too.
    prefixes = sorted(pattern for pattern in open_ends if _PREFIX.fullmatch(pattern))
    return any(after.startswith(before) for before, after in itertools.pairwise(prefixes))


def _path_of(reference: str) -> _Path:
    path: _Path = None
    for part in reference.lstrip("#").split("/"):
        path = (path, part) if part else path
    return path


def _spelled(path: _Path) -> str:
    steps: list[str] = []
    while path is not None:
        path, key = path
        short = str(key)[:_MAX_SHOWN_CHARS]
        steps.append(f"[{key}]" if isinstance(key, int) else f".{short}")
    return "".join(reversed(steps))
