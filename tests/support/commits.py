"""Which commit is measured, for pages that say so, and what has changed since."""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Hashable, Iterable
from functools import lru_cache
from pathlib import Path
from types import CodeType

CODE = (".py", ".cpp", ".h")


def commit_of(root: Path, page: Path) -> str:
    """The commit that is checked out in `root`, with a + if a file but `page` differs from it."""
    changed = _git(root, "status", "--porcelain", "--", ".", f":(exclude){page.relative_to(root)}")
    return _git(root, "rev-parse", "--short", "HEAD").strip() + "+" * bool(changed)


def files_since(root: Path, commit: str, under: str) -> dict[str, str] | None:
    """The files of Python and C++ below the folder `under` that differ between a commit and the
    tree, with their blob in the commit ("" for a new file); None if this clone does not have it."""
    try:
        lines = _git(root, "diff", "--raw", "--no-abbrev", "--no-renames", commit, "--", under)
    except subprocess.CalledProcessError:
        return None
    fields = (line.split(maxsplit=5) for line in lines.splitlines())
    files = {path: before.strip("0") and before for *_, before, _, _, path in fields}
    new = _git(root, "ls-files", "--others", "--exclude-standard", "--", under).splitlines()
    return {path: files.get(path, "") for path in (*files, *new) if path.endswith(CODE)}


def is_guarded(path: str, guards: Iterable[str]) -> bool:
    """Whether one of these names a file: itself, a folder, or, with a slash at its end, the files
    of a folder without those of its folders."""
    folder = f"{path.rpartition('/')[0]}/"
    return any(
        guard == folder if guard.endswith("/") else f"{path}/".startswith(f"{guard}/")
        for guard in guards
    )


def code_differs(root: Path, path: str, blob: str) -> bool:
    """Whether a file computes something else than it did as this blob. Comments, docstrings, names
    of variables and the form of lines compute nothing in Python; in C++ they count."""
    now = root / path
    text = now.read_text(encoding="utf-8") if now.exists() else ""
    return _code(path, _blob(root, blob)) != _code(path, text)


@lru_cache(maxsize=1024)
def _blob(root: Path, blob: str) -> str:
    return _git(root, "cat-file", "blob", blob) if blob else ""


@lru_cache(maxsize=1024)
def _code(path: str, text: str) -> Hashable:
    """What of a file is computed: of Python the byte code, without docstrings."""
    if not path.endswith(".py"):
        return text
    tree = ast.parse(text)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            kept = [each for each in body if not _is_constant(each)]
            node.body = kept or [ast.Pass(lineno=1, col_offset=0)]  # type: ignore[attr-defined]
    return _computed(compile(tree, "", "exec", dont_inherit=True))


def _computed(code: CodeType) -> Hashable:
    """What byte code does, whatever its variables are called and on which lines it is written."""
    constants = (_computed(c) if isinstance(c, CodeType) else repr(c) for c in code.co_consts)
    return code.co_code, code.co_exceptiontable, code.co_names, tuple(constants)


def _is_constant(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _git(root: Path, *arguments: str) -> str:
    return subprocess.run(
        ["git", "-C", str(root), *arguments],
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=True,
    ).stdout
