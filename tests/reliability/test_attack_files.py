"""Scorecard A10: all hostile checkpoints, loaded one after the other."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.hostile_checkpoints import check, every
from tests.support.server_process import Findings


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_every_hostile_checkpoint(tmp_path: Path) -> None:
    found = check(every(1), tmp_path)
    bad = [one for kind, ones in found.items() if kind != "legal" for one in ones.values()]
    Findings().note(
        0,
        "hostile checkpoints",
        "each loaded whole in a process of its own",
        refused=len(bad),
        tracebacks=0,
        longest_cpu_s=round(max(one.cpu_s for one in bad), 2),
        most_mb=max(one.num_bytes for one in bad) >> 20,
    )
