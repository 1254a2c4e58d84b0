"""The layering of `docs/architecture.md`, enforced: who may import whom, and what a module says.

Reads the source with `ast`, so an import inside a function or under TYPE_CHECKING counts too. The
checks are functions of a tree of sources; the tests at the end run them on a tree that is broken
on purpose, to show that each of them can fail.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "infer"
FORBIDDEN_NAMES = {"utils", "util", "helpers", "helper", "common", "misc"}

# Longest prefix wins. A module imports only from rows below its own, or from its own package.
ROWS = {
    "errors": 0,
    "grammar": 0,
    "threads": 0,
    "version": 0,
    "types": 1,
    "config": 1,
    "facts": 1,
    "files": 1,
    "cache": 2,
    "kernels": 2,
    "kernels.native": 1,  # the compiled kernel, used by a backend
    "text": 2,
    "attention": 3,
    "schedule": 3,
    "models": 3,
    "runner": 4,
    "engine.checkpoint": 5,
    "engine.core": 5,
    "engine.machine": 5,
    "engine.output": 5,
    "engine.intake": 5,
    "engine.worker": 6,
    "engine.ledger": 5,
    "engine.messages": 7,
    "engine.child": 8,
    "engine.process": 9,
    "engine.async_llm": 7,
    "engine.plan": 6,
    "engine.launch": 10,
    "engine.assemble": 8,
    "engine.llm": 9,
    "server": 11,
    "server.__main__": 14,
    "bench": 11,
    "bench.command": 12,
    "cli": 13,
    "": 14,  # infer/__init__.py: the public names
}
# Imported without the prefix `infer.`; the second column may not appear in the first, at all.
BANNED = [
    ("errors", "torch"),
    ("types", "torch"),
    ("config", "torch"),
    ("cache", "torch"),
    ("schedule", "torch"),
    ("text", "torch"),
    ("engine.core", "torch"),
    ("engine.output", "torch"),
    ("engine.intake", "torch"),
    ("engine.worker", "torch"),
    ("engine.async_llm", "torch"),
    ("engine.ledger", "torch"),
    ("engine.messages", "torch"),
    ("engine.child", "torch"),
    ("engine.process", "torch"),
    ("engine.launch", "torch"),
    ("server", "torch"),
    *((f"bench.{name}", "torch") for name in ("client", "drive", "engine", "measure", "report")),
    *((f"bench.{name}", "torch") for name in ("results", "workloads")),
    ("", "transformers"),
    ("", "pickle"),
    *((name, "triton") for name in ("runner", "engine", "models", "server", "cli", "bench")),
    ("models", "infer.cache"),
    ("models", "infer.schedule"),
    ("models", "infer.attention"),
    ("schedule", "infer.models"),
]
STDLIB_ONLY = (
    *("errors", "grammar", "types", "config", "facts", "files", "version"),
    *("cache", "schedule", "engine.core"),
)
# Concrete parts that only the composition root may name.
CONCRETE = (
    "infer.attention.native",
    "infer.attention.sdpa",
    "infer.attention.triton",
    "infer.runner.device_runner",
    "infer.runner.model_runner",
    "infer.runner.storage",
)
COMPOSITION_ROOT = "engine.assemble"


def module_name(path: Path, root: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module or ""


def lookup(name: str) -> tuple[str, int]:
    parts = name.split(".")
    while parts and ".".join(parts) not in ROWS:
        parts.pop()
    key = ".".join(parts)
    if not key and name:
        raise AssertionError(f"{name} has no row in the layering; give it one")
    return key, ROWS[key]


def layer_problems(root: Path) -> list[str]:
    problems = []
    for path in sorted(root.rglob("*.py")):
        name = module_name(path, root)
        if name in ("engine",):
            continue  # a package docstring
        key, row = lookup(name)
        for target in imports(path):
            if not target.startswith("infer.") and target != "infer":
                continue
            target_key, target_row = lookup(target.removeprefix("infer").lstrip("."))
            if target_key != key and target_row >= row:
                problems.append(f"{name} (row {row}) imports {target} (row {target_row})")
    return problems


def is_inside(name: str, package: str) -> bool:
    return not package or name == package or name.startswith(package + ".")


def ban_problems(root: Path) -> list[str]:
    stdlib = __import__("sys").stdlib_module_names
    problems = []
    for path in sorted(root.rglob("*.py")):
        name = module_name(path, root)
        for target in imports(path):
            for package, banned in BANNED:
                if is_inside(name, package) and is_inside(target, banned):
                    problems.append(f"{name} imports {target}, which {package or 'infer'} must not")
            if target in CONCRETE and name != COMPOSITION_ROOT:
                problems.append(f"{name} names the concrete {target}")
            outside = target.split(".")[0] not in {*stdlib, "infer", "__future__"}
            if outside and any(is_inside(name, package) for package in STDLIB_ONLY):
                problems.append(f"{name} imports {target}: only the standard library is allowed")
    return problems


def name_problems(root: Path) -> list[str]:
    problems = []
    for path in sorted(root.rglob("*.py")):
        if path.stem in FORBIDDEN_NAMES:
            problems.append(f"{path.relative_to(root)}: a name that says nothing")
        if not ast.get_docstring(ast.parse(path.read_text())):
            problems.append(f"{path.relative_to(root)} does not say what it owns")
    return problems


MUTABLE = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)


def state_problems(root: Path) -> list[str]:
    """Module-level names in lower case that hold something mutable, or `global` statements."""
    problems = []
    for path in sorted(root.rglob("*.py")):
        tree = ast.parse(path.read_text())
        for node in tree.body:
            if isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(node.value, MUTABLE):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                for target in targets:
                    text = ast.unparse(target)
                    if not text.isupper() and text != "__all__":
                        problems.append(f"{path.relative_to(root)}: {text} is mutable state")
        problems += [
            f"{path.relative_to(root)}:{node.lineno}: global"
            for node in ast.walk(tree)
            if isinstance(node, ast.Global)
        ]
    return problems


CHECKS = [layer_problems, ban_problems, name_problems, state_problems]


@pytest.mark.parametrize("check", CHECKS)
def test_the_source_keeps_to_the_layering(check) -> None:
    assert check(SOURCE) == []


BREAKS = [
    (layer_problems, "cache/x.py", "from infer.schedule.sequence import Plan"),
    (layer_problems, "engine/core.py", "def f():\n    import infer.engine.llm"),
    (layer_problems, "text/x.py", "import infer.models.config"),
    (ban_problems, "schedule/x.py", "import torch.nn"),
    (ban_problems, "server/x.py", "from torch import Tensor"),
    (ban_problems, "models/x.py", "from transformers import AutoModel"),
    (ban_problems, "cache/x.py", "import numpy"),
    (ban_problems, "engine/llm.py", "from infer.attention.sdpa import SDPABackend"),
    (name_problems, "runner/utils.py", '"""Doc."""'),
    (name_problems, "runner/x.py", "x = 1"),
    (state_problems, "runner/x.py", "cache = {}"),
    (state_problems, "runner/x.py", "def f():\n    global cache\n    cache = 1"),
]


@pytest.mark.parametrize(("check", "file", "source"), BREAKS)
def test_a_broken_layer_is_found(check, file: str, source: str, tmp_path: Path) -> None:
    path = tmp_path / file
    path.parent.mkdir(parents=True)
    path.write_text(source)
    assert check(tmp_path)


def test_the_api_side_needs_no_torch() -> None:
    """Importing the server and the terminal's entry point must not import torch."""
    import subprocess
    import sys

    code = (
        "import sys; import infer, infer.server.app, infer.engine.async_llm, infer.cli.main;"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
