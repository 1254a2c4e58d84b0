"""Which commit is measured, for pages that say so."""

from __future__ import annotations

import subprocess
from pathlib import Path


def commit_of(root: Path, page: Path) -> str:
    """The commit that is checked out in `root`, with a + if a file but `page` differs from it."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(root), *arguments]
        return subprocess.run(
            command, capture_output=True, text=True, encoding="utf-8", check=True
        ).stdout

    changed = git("status", "--porcelain", "--", ".", f":(exclude){page.relative_to(root)}")
    return git("rev-parse", "--short", "HEAD").strip() + "+" * bool(changed)
