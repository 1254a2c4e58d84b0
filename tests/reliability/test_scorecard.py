"""The page of the scorecard names, for each row, the commit on which it was measured."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.reliability.scorecard import PAGE, ROWS, page, written
from tests.support.commits import commit_of

COMMIT = re.compile(r"(before )?[0-9a-f]{7,40}\+?")


def cells_of(text: str) -> dict[str, list[str]]:
    """The cells of the rows of a page's table, by the row's number."""
    lines = {number: line for number, (line, _) in written(text).items()}
    return {n: [cell.strip() for cell in line.split("|")[1:-1]] for n, line in lines.items()}


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
    result |= {"commit": "0123abc+", "findings": [], "failures": []}
    after = page({"5": result}, before)
    old, new = cells_of(before), cells_of(after)
    assert new.pop("5")[2:] == ["pass", "7 s", "2026-12-01", "0123abc+"]
    del old["5"]
    assert new == old
    assert page({}, after) == after


def test_the_commit_of_a_changed_tree_has_a_mark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{name}_NAME", "a")
        monkeypatch.setenv(f"GIT_{name}_EMAIL", "a@example.org")

    def git(*arguments: str) -> None:
        subprocess.run(["git", "-C", str(tmp_path), *arguments], check=True, capture_output=True)

    git("init")
    (tmp_path / "docs").mkdir()
    for name in ("a", "docs/reliability.md"):
        (tmp_path / name).write_text("1", encoding="utf-8")
    git("add", ".")
    git("commit", "-m", "one")
    clean = commit_of(tmp_path, tmp_path / "docs/reliability.md")
    assert re.fullmatch("[0-9a-f]{7,40}", clean)
    (tmp_path / "docs/reliability.md").write_text("2", encoding="utf-8")
    assert commit_of(tmp_path, tmp_path / "docs/reliability.md") == clean
    (tmp_path / "a").write_text("2", encoding="utf-8")
    assert commit_of(tmp_path, tmp_path / "docs/reliability.md") == clean + "+"
