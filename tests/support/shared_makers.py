"""Where the source makes what callers share, and where it refuses them: found by its syntax.

A *maker* is a call that makes a pool, a semaphore, a queue, a lock, a thread, a process or a store
that forgets; in the rooms that serve callers also an object of a class of ours that makes one of
these. A *refusal* is a call that makes an error for a caller who finds no room. Each has a name
that does not depend on lines.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "infer"
MAKERS = {
    *("Semaphore", "BoundedSemaphore", "Condition", "Lock", "RLock", "Barrier"),
    *("Thread", "Timer", "ThreadPoolExecutor", "ProcessPoolExecutor", "Pool", "Process"),
    *("to_thread", "run_in_executor", "start_new_thread"),
    *("Queue", "SimpleQueue", "LifoQueue", "PriorityQueue", "JoinableQueue", "deque"),
    *("OrderedDict", "lru_cache", "TTLCache", "WeakValueDictionary"),
    *("Popen", "create_subprocess_exec", "create_subprocess_shell", "fork", "posix_spawn"),
    *("create_engine", "AsyncClient", "HTTPTransport", "start_server", "create_server"),
    *("KeyPlaces", "BodyBudget", "start_module"),
}
"""What the standard library and others have for it, and what counts for it."""
SERVING = ("server/", "text/", "fair_queue.py", "threads.py")
"""The rooms whose classes are makers."""
REFUSALS = {"too_many", "OverloadedError", "HttpError"}
"""What makes the error for a caller who finds no room; an `HttpError` by its status."""
_FULL = {429, 503}
_SCOPES = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def _called(node: ast.Call) -> str:
    called: ast.expr = node.func
    while isinstance(called, ast.Subscript):
        called = called.value
    return str(getattr(called, "attr", getattr(called, "id", "")))


def _target(node: ast.AST) -> str:
    """What an assignment assigns to: `_name` of `self._name`, or a variable's name."""
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    first = targets[0]
    return str(getattr(first, "attr", getattr(first, "id", "")))


def calls_in(tree: ast.AST, names: set[str]) -> Iterator[tuple[str, str]]:
    """(qualified name of what is assigned to, or else of the function; name of what is called) of
    each call. The method that sets an attribute is left out: `Class._attribute`."""
    return (found for found in _all_calls_in(tree) if found[1] in names)


@cache
def _all_calls_in(tree: ast.AST) -> list[tuple[str, str]]:
    """`calls_in` with any name: trees are asked for several sets of names."""
    calls: list[tuple[str, str]] = []
    todo: list[tuple[ast.AST, tuple[str, ...], str]] = [(tree, (), "")]
    while todo:
        node, scope, target = todo.pop()
        if isinstance(node, _SCOPES):
            scope, target = (*scope, node.name), ""
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr):
            target = _target(node)
        if isinstance(node, ast.Call) and _counts(node):
            is_attribute = target.startswith("_") and len(scope) > 1
            where = scope[:1] if is_attribute else scope
            calls.append((".".join((*where, target) if target else where), _called(node)))
        todo += [(child, scope, target) for child in reversed([*ast.iter_child_nodes(node)])]
    return calls


def _counts(node: ast.Call) -> bool:
    """Whether a call is not of an `HttpError` with a status that says something else."""
    status = node.args[0] if _called(node) == "HttpError" and node.args else None
    return not isinstance(status, ast.Constant) or status.value in _FULL


@cache
def _trees() -> dict[str, ast.Module]:
    files = sorted(SOURCE.rglob("*.py"))
    return {
        file.relative_to(SOURCE).as_posix(): ast.parse(file.read_text(encoding="utf-8"))
        for file in files
    }


@cache
def holders() -> frozenset[str]:
    """The classes of `SERVING` that make what is shared, or an object of such a class."""
    found: set[str] = set()
    while True:
        names = MAKERS | found
        new = {
            node.name
            for file, tree in _trees().items()
            if file.startswith(SERVING)
            for node in tree.body
            if isinstance(node, ast.ClassDef) and any(calls_in(node, names))
        }
        if new <= found:
            return frozenset(found)
        found |= new


def sites(names: set[str], trees: dict[str, ast.Module] | None = None) -> set[str]:
    """`file:where:called` of each call; a second one of the same name there ends in `#2`."""
    found = set()
    for file, tree in (trees or _trees()).items():
        seen: Counter[str] = Counter()
        for where, called in calls_in(tree, names):
            name = f"{file}:{where}:{called}"
            seen[name] += 1
            found.add(name if seen[name] == 1 else f"{name}#{seen[name]}")
    return found
