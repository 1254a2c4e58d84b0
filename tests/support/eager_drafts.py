"""Drafts at every chance, whatever they cost: in a test, and in an engine process."""

from __future__ import annotations

from typing import Any

import pytest

from infer.engine.build.assemble import prepare_process
from infer.engine.loop import Blueprint
from infer.schedule import speculation
from infer.schedule.cost_model import SpeculationGain

EAGER: dict[str, Any] = {
    "draft_counts": lambda acceptance, limits, *rest: list(limits),
    "TOKENS_TRIED": 0,
    "CATCH_UP_SHARE": float("inf"),
}
"""What `infer.schedule.speculation` has instead, by name: as many tokens are drafted as are
allowed."""


def propose_eagerly(patch: pytest.MonkeyPatch) -> None:
    """Have as many tokens proposed as are allowed, whatever they cost."""
    patch.setattr(speculation, "worthwhile", lambda *each: each[-1])
    patch.setattr(SpeculationGain, "may_propose", True)


def draft_eagerly(patch: pytest.MonkeyPatch) -> None:
    """Have as many tokens drafted as are allowed."""
    for name, value in EAGER.items():
        patch.setattr(speculation, name, value)


def eager_blueprint(settings: dict[str, Any]) -> Blueprint:
    """The blueprint of these settings of an engine, in a process that is changed for good."""
    vars(speculation).update(EAGER)
    return prepare_process(settings)
