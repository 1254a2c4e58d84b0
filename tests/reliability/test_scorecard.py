"""The page of the scorecard names, for each row, the commit on which it was measured, and says
which rows are older than the code that they guard."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.reliability.rows import ROWS
from tests.reliability.scorecard import (
    PAGE,
    ROOT,
    SOURCE,
    STALE,
    cells_of,
    marked,
    page,
    stale_rows,
    was_skipped,
)
from tests.support.commits import code_differs, commit_of, files_since, is_guarded

COMMIT = re.compile(r"[0-9a-f]{7,40}\+?")


def test_each_row_of_the_page_has_a_commit() -> None:
    cells = cells_of(PAGE.read_text("utf-8"))
    assert set(cells) <= {row.number for row in ROWS}
    assert len(cells) > 50
    for number, (*_, date, commit) in cells.items():
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", date), number
        assert COMMIT.fullmatch(commit), number


def test_a_row_is_written_with_its_commit_and_the_others_stay() -> None:
    before = PAGE.read_text("utf-8")
    result: dict[str, Any] = {"verdict": "pass", "seconds": 7, "date": "2026-12-01"}
    result |= {"commit": "0123abc+", "findings": [], "failures": [], "skipped": []}
    after = page({"5": result}, before)
    old, new = cells_of(before), cells_of(after)
    assert new.pop("5")[2:] == ["pass", "7 s", "2026-12-01", "0123abc+"]
    del old["5"]
    assert new == old
    assert page({}, after) == after


@pytest.fixture
def git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Commands of git in a repository with one commit, of `files`."""
    for name in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{name}_NAME", "a")
        monkeypatch.setenv(f"GIT_{name}_EMAIL", "a@example.org")

    def run(*arguments: str) -> None:
        subprocess.run(["git", "-C", str(tmp_path), *arguments], check=True, capture_output=True)

    run("init")
    files = {
        "docs/reliability.md": "1",
        "src/a.py": 'def a(x=0):\n    """One."""\n    return 1  # one\n',
        "src/room/b.py": "B = 1\n",
        "src/room/inner/c.cpp": "int c;\n",
        "src/room/page.js": "1;",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    run("add", ".")
    run("commit", "-m", "one")
    return run


def test_the_commit_of_a_changed_tree_has_a_mark(git: Callable[..., None], tmp_path: Path) -> None:
    of_page = tmp_path / "docs/reliability.md"
    clean = commit_of(tmp_path, of_page)
    assert re.fullmatch("[0-9a-f]{7,40}", clean)
    of_page.write_text("2", encoding="utf-8")
    assert commit_of(tmp_path, of_page) == clean
    (tmp_path / "src/a.py").write_text("2", encoding="utf-8")
    assert commit_of(tmp_path, of_page) == clean + "+"


def test_what_is_computed_differs_and_is_guarded(git: Callable[..., None], tmp_path: Path) -> None:
    first = commit_of(tmp_path, tmp_path / "docs/reliability.md")

    def changed(*guards: str) -> list[str]:
        files = files_since(tmp_path, first, "src")
        assert files is not None
        return [
            path
            for path, blob in files.items()
            if is_guarded(path.removeprefix("src/"), guards) and code_differs(tmp_path, path, blob)
        ]

    def write(path: str, text: str) -> None:
        (tmp_path / path).write_text(text, encoding="utf-8")

    everything = ("a.py", "room")
    assert changed(*everything) == []
    write("src/a.py", 'def a(unused=1):\n    """Two."""\n\n    return 1\n')
    assert changed(*everything) == ["src/a.py"]
    write("src/a.py", 'def a(y=0):\n    """Two."""\n\n    return 1\n')
    write("src/room/page.js", "2;")
    write("docs/other.py", "2")
    assert changed(*everything) == []
    write("src/a.py", "def a(x=0):\n    return 2\n")
    assert changed(*everything) == changed("a.py") == ["src/a.py"]
    assert changed("a", "room") == []
    write("src/room/inner/c.cpp", "int d;\n")
    assert changed("room") == changed("room/inner/") == ["src/room/inner/c.cpp"]
    assert changed("room/") == []
    write("src/room/new.py", "N = 1\n")
    assert changed("room/") == ["src/room/new.py"]
    git("add", ".")
    git("commit", "-m", "two")
    (tmp_path / "src/room/b.py").unlink()
    assert set(changed("room/")) == {"src/room/new.py", "src/room/b.py"}
    assert files_since(tmp_path, "0123abc", "src") is None


def test_each_row_guards_code_that_is_there() -> None:
    for row in ROWS:
        assert row.guards, row.number
        for guard in row.guards:
            assert (ROOT / SOURCE / guard).exists(), (row.number, guard)


def test_a_row_that_is_older_than_its_code_says_so() -> None:
    text = PAGE.read_text("utf-8")
    marked_ones = {n for n, cells in cells_of(text).items() if cells[2].endswith(STALE)}
    silent = stale_rows(text, [row for row in ROWS if row.number not in marked_ones])
    assert not silent, "run `python tests/reliability/scorecard.py --marks`"
    (fuzzer,) = (line for line in page({}, text).splitlines() if line.startswith("## The fuzzer"))
    assert STALE not in fuzzer or fuzzer in text


def test_marks_are_those_of_the_stale_rows_and_of_no_others() -> None:
    text = marked(PAGE.read_text("utf-8"), {"5", "A8"})
    stale = {number for number, cells in cells_of(text).items() if cells[2].endswith(STALE)}
    assert stale == {"5", "A8"}
    assert not any(cells[2].endswith(STALE) for cells in cells_of(marked(text, ())).values())


def test_of_a_commit_that_is_not_here_the_mark_stays() -> None:
    text = re.sub(r"(?m)^(\| [57] \|.*) [0-9a-f]+\+? \|$", r"\1 0123abc |", PAGE.read_text("utf-8"))
    rows = [row for row in ROWS if row.number in ("5", "7")]
    found = stale_rows(marked(text, {"5"}), rows)
    assert found["5"] == ["its commit is not here"]
    assert "7" not in found


def test_what_was_skipped_has_not_passed() -> None:
    assert not was_skipped("....\n12 passed, 3 deselected in 3.20s\n")
    assert not was_skipped("....\n11 passed, 1 skipped in 3.20s\n")
    assert was_skipped("s\n1 skipped in 0.03s")
    assert was_skipped("\nno tests ran in 0.03s")
