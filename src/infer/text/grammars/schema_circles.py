"""`circular`: the nodes of a JSON schema that join a reference to a schema around them with more.

llguidance compiles a bare `$ref` when it is reached, so schemas may hold themselves. Where a `$ref`
stands beside other keywords, or in a list whose members are joined with something, it merges both
at once, and refuses a whole schema in which such a merging leads back to itself: a node of a tree
whose child is `{"$ref": "#/$defs/node", "nullable": true}`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

Node = dict[str, Any]
Target = Callable[[Node], Any]
"""The schema that the `$ref` of a node means; None if there is none."""

NOTES = frozenset(
    ("$anchor", "$comment", "$defs", "$id", "$schema", "contentEncoding", "contentMediaType",
     "default", "definitions", "description", "examples", "id", "readOnly", "title", "writeOnly")
)  # fmt: skip
"""Keywords beside which a `$ref` is bare to llguidance."""
LISTS = ("allOf", "anyOf", "oneOf")


def asserted(node: Node) -> list[str]:
    """The keywords of a node that are joined with one another."""
    return [name for name in node if name not in NOTES]


def members(node: Node) -> Iterator[tuple[str, int, Node]]:
    """(keyword, place, member) for each schema that holds for the same value as the node."""
    for name in LISTS:
        for i, member in enumerate(node.get(name, ())):
            if isinstance(member, dict):
                yield name, i, member


def leads_back(node: Node, circle_of: Mapping[int, int], circle: int, target: Target) -> bool:
    """Whether a node, or one that holds for the same value, refers to a schema of `circle`."""
    stack = [node]
    while stack:
        member_node = stack.pop()
        if "$ref" in member_node and circle_of.get(id(target(member_node))) == circle:
            return True
        stack += (member for _, _, member in members(member_node))
    return False


def circular(
    nodes: Sequence[Node], inside: Callable[[Node], Iterable[Any]], target: Target
) -> tuple[list[Node], dict[int, int]]:
    """(nodes of which a merging leads back to itself, circle of each node's id).

    `nodes`: all that take part. `inside`: the schemas within a node. The time is linear in their
    number; nothing recurses.
    """
    joining = [node for node in nodes if _joins(node)]
    merged, stack = set[int](), list[Node](joining)
    while stack:
        node = stack.pop()
        if id(node) in merged:
            continue
        merged.add(id(node))
        stack += (member for _, _, member in members(node))
        if "$ref" in node and isinstance(referenced := target(node), dict):
            stack.append(referenced)

    def next_of(node: Node) -> list[Node]:
        following = [schema for schema in inside(node) if isinstance(schema, dict)]
        if id(node) in merged and "$ref" in node and isinstance(aim := target(node), dict):
            following.append(aim)
        return following

    circle_of = _circles(nodes, next_of)
    back = [n for n in joining if leads_back(n, circle_of, circle_of[id(n)], target)]
    return back, circle_of


def _joins(node: Node) -> bool:
    is_joint = len(asserted(node)) > 1 or len(node.get("allOf", ())) > 1
    return is_joint and any(name in node for name in ("$ref", *LISTS))


def _circles(nodes: Sequence[Node], next_of: Callable[[Node], list[Node]]) -> dict[int, int]:
    """A number for the id of each node, equal for nodes that lead to one another (Tarjan).

    A node that leads nowhere back has a number of its own.
    """
    order: dict[int, int] = {}
    low: dict[int, int] = {}
    circle_of: dict[int, int] = {}
    open_ids: list[int] = []
    for root in nodes:
        if id(root) in order:
            continue
        work = [(root, iter(next_of(root)))]
        order[id(root)] = low[id(root)] = len(order)
        open_ids.append(id(root))
        while work:
            node, rest = work[-1]
            key = id(node)
            for other in rest:
                if id(other) not in order:
                    order[id(other)] = low[id(other)] = len(order)
                    open_ids.append(id(other))
                    work.append((other, iter(next_of(other))))
                    break
                if id(other) not in circle_of:
                    low[key] = min(low[key], order[id(other)])
            else:
                work.pop()
                if work:
                    above = id(work[-1][0])
                    low[above] = min(low[above], low[key])
                while low[key] == order[key] and key not in circle_of:
                    circle_of[open_ids.pop()] = order[key]
    return circle_of
