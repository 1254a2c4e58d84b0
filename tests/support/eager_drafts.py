"""An engine process that drafts at every chance, whatever it costs."""

from __future__ import annotations

from typing import Any

from infer.engine.build.assemble import prepare_process
from infer.engine.loop import Blueprint
from infer.schedule import speculation


def eager_blueprint(settings: dict[str, Any]) -> Blueprint:
    """The blueprint of these settings of an engine, in a process that is changed for good."""
    vars(speculation).update(
        draft_counts=lambda acceptance, limits, *rest: list(limits),
        TOKENS_TRIED=0,
        CATCH_UP_SHARE=float("inf"),
    )
    return prepare_process(settings)
