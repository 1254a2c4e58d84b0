"""The pages of docs/howto: what they say is done to a copy of the repository, and their tests run.

A block that begins with `--- path` changes a file: its hunks, apart by `@@`, are lines that stay
(` `), go (`-`) and come (`+`). A block that begins with `# path` or `// path` is a new file. The
`pytest` commands of a page are its proof. So a page cannot leave out a file, and cannot fall
behind the source. Of a change that the repository has already, the copy is without it first.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.test_architecture import CHECKS

ROOT = Path(__file__).parents[1]
PAGES = {path.stem: path for path in sorted((ROOT / "docs/howto").glob("*.md"))}
LATER = ("docs/models.md", "docs/api.md", "CHANGELOG.md")
"""Files of which a page says in words what to add."""
SHAPES = "tests/support/model_shapes.py"
"""The file to which the page of a model family adds the family's shapes."""
PARITY = (
    *("tests/models/test_parity.py", "tests/models/test_serving_parity.py"),
    *("tests/kernels/test_layers.py", "tests/cells/test_moved_cells.py"),
    "tests/models/test_tensor_list.py",
)
"""What compares a family with its reference: by its loop, by what serves, and in cells; and the
list of its tensors with what its class takes."""
LATTICE = ("tests/engine/test_lattice_families.py",)
"""What runs a family in every kind of batch."""
WRITERS = ("tests/test_docs.py", "tests/test_architecture.py")
"""Programs that write the tables of the pages; as tests they compare them with the source."""


def blocks(page: str) -> list[str]:
    """The fenced blocks of a page."""
    return re.findall(
        r"^```\w*\n(.*?)^```$", PAGES[page].read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )


def edits(page: str) -> dict[str, str]:
    """Path → the block that changes or makes the file."""
    found = {}
    for block in blocks(page):
        head, _, rest = block.partition("\n")
        if match := re.fullmatch(r"(?:---|#|//) ((?:src|tests|setup|docs)[\w/.]*)", head):
            assert match[1] not in found, f"{match[1]} has two blocks"
            found[match[1]] = rest if head.startswith("---") else block
    return found


def listed(page: str) -> set[str]:
    """The files that the tables of a page name."""
    return set(
        re.findall(
            r"^\| (?:\[|`)([\w/.]+)[\]`]", PAGES[page].read_text(encoding="utf-8"), re.MULTILINE
        )
    )


def changed(path: str, source: str, block: str) -> tuple[str, str]:
    """The source without the hunks of a block and with them, each where its old lines are."""
    before = after = source
    for hunk in block.split("@@\n"):
        lines = hunk.removesuffix("\n").split("\n")
        assert all(line[:1] in (" ", "-", "+", "") for line in lines), hunk
        old = "".join(line[1:] + "\n" for line in lines if line[:1] != "+")
        new = "".join(line[1:] + "\n" for line in lines if line[:1] != "-")
        if source.count(new) == 1:
            before = before.replace(new, old)
        else:
            assert source.count(old) == 1, f"{path} has {source.count(old)} times:\n{old}"
            after = after.replace(old, new)
    return before, after


def results(page: str) -> dict[str, tuple[str, str]]:
    """Path → what the file is before the changes of a page, and after them."""
    found = {}
    for path, block in edits(page).items():
        is_new = block.startswith(("# ", "// "))
        assert is_new is not (ROOT / path).exists(), f"{path}: new, or to be changed?"
        if is_new:
            found[path] = ("", block)
        else:
            found[path] = changed(path, (ROOT / path).read_text(encoding="utf-8"), block)
    return found


def copy_of_the_repository(to: Path) -> Path:
    """Sources and tests; what is large is linked."""
    ignored = shutil.ignore_patterns("__pycache__", "*.safetensors", "clients", "reliability")
    for name in ("src", "tests", "docs"):
        shutil.copytree(ROOT / name, to / name, ignore=ignored)
    for name in ("pyproject.toml", "setup.py", "README.md", "CONTRIBUTING.md", "LICENSE"):
        shutil.copy(ROOT / name, to)
    for weights in (ROOT / "src/infer/demo_model").glob("*.safetensors"):
        (to / "src/infer/demo_model" / weights.name).symlink_to(weights)
    return to


def commands(page: str) -> list[list[str]]:
    """The arguments of the page's calls of pytest."""
    lines = [line for block in blocks(page) for line in block.splitlines()]
    return [shlex.split(line)[1:] for line in lines if line.startswith("pytest ")]


def family(page: str) -> str | None:
    """The model family that a page adds."""
    found = re.search(r'^\+    "(\w+)": \{$', edits(page).get(SHAPES, ""), re.MULTILINE)
    return found and found[1]


def environment(root: Path) -> dict[str, str]:
    """Variables with which the package of a copy is imported."""
    return {**os.environ, "PYTHONPATH": str(root / "src")}


def run(arguments: list[str], root: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *arguments],
        cwd=root,
        env=environment(root),
        capture_output=True,
        text=True,
        timeout=600,
        encoding="utf-8",
    )


COLLECTS = """
import json, sys, pytest
calls = json.loads(sys.argv[1])
codes = [pytest.main(["-q", "--collect-only", "-n", "0", *call]) for call in calls]
sys.exit(f"{codes} {calls}" if any(codes) else 0)
"""
"""A program that ends with an error if one of several calls of pytest selects no test."""


def build(root: Path) -> None:
    """Compile the native library of a copy; the test is skipped where that cannot be."""
    if not shutil.which("c++"):
        pytest.skip("no C++ compiler here")
    command = [sys.executable, "setup.py", "build_ext", "--inplace"]
    subprocess.run(command, cwd=root, check=True, capture_output=True)


@pytest.mark.parametrize("page", PAGES)
def test_a_page_names_the_files_that_it_touches(page: str) -> None:
    assert listed(page) - set(LATER) == set(edits(page))
    for path, (_, source) in results(page).items():
        if path.endswith(".py"):
            functions = Counter(
                node.name for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)
            )
            twice = [name for name, count in functions.items() if count > 1]
            assert not twice, f"{path} has other functions of these names already: {twice}"
    assert commands(page)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", [page for page in PAGES if family(page)])
def test_a_family_that_a_page_adds_is_right_in_every_format(page: str, tmp_path: Path) -> None:
    root = copy_of_the_repository(tmp_path)
    for path, (_, source) in results(page).items():
        (root / path).write_text(source, encoding="utf-8")
    done = run(["-n", "0", *PARITY, *LATTICE, "-k", f"{family(page)} or registry"], root)
    assert done.returncode == 0, done.stdout[-4000:]


@pytest.mark.parametrize("page", PAGES)
def test_the_changes_of_a_page_keep_the_rules(page: str, tmp_path: Path) -> None:
    root, made = copy_of_the_repository(tmp_path), results(page)
    for path, (_, after) in made.items():
        (root / path).write_text(after, encoding="utf-8")
    for check in CHECKS:
        assert check(root / "src/infer") == [], check.__name__
    sources = [path for path in made if path.endswith(".py")]
    for linter in (["check"], ["format", "--check"]):
        subprocess.run([sys.executable, "-m", "ruff", *linter, *sources], cwd=root, check=True)
    collect = [sys.executable, "-c", COLLECTS, json.dumps(commands(page))]
    subprocess.run(collect, cwd=root, env=environment(root), check=True, timeout=300)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("page", PAGES)
def test_the_tests_of_a_page_need_its_changes(page: str, tmp_path: Path) -> None:
    root = copy_of_the_repository(tmp_path)
    made = results(page)
    for path, (before, after) in made.items():
        is_test = path.startswith("tests")
        if is_test or before:
            (root / path).write_text(after if is_test else before, encoding="utf-8")
    if any(path.endswith(".cpp") for path in made):
        build(root)
    assert run(commands(page)[0], root).returncode in (1, 2, 4), "passes without the change"
    for path, (_, after) in made.items():
        (root / path).write_text(after, encoding="utf-8")
    if any(path.endswith(".cpp") for path in made):
        build(root)
    for program in WRITERS:
        subprocess.run([sys.executable, program], cwd=root, env=environment(root), check=True)
    whole = [[*WRITERS, "-k", "table or families"]]
    if name := family(page):
        whole.append([*PARITY, *LATTICE, "-m", "slow or not slow", "-k", name])
    for command in [*commands(page), *whole]:
        done = run(command, root)
        assert done.returncode == 0, done.stdout[-4000:]
