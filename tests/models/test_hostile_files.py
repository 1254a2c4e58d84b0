"""Tests of hostile checkpoints: each is refused with a `LoadError`, in little time and memory.

Each case is loaded completely, as by `LLM`, in a process of its own, which measures its time and
memory. All cases share a test, because the process from which they are forked takes seconds.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.hostile_checkpoints import (
    check,
    every,
)


@pytest.mark.timeout(300)
def test_bad_files_are_refused(tmp_path: Path) -> None:
    """Some cases of each kind; the scorecard's row A10 has all of them."""
    check(every(12), tmp_path)
