"""`begin_stage`: says which part of loading a model begins, to whoever shows it

The stages are lines of a logger of their own, at the level DEBUG. So an engine process sends them
to its parent as it sends its log, and nobody needs to look.
"""

from __future__ import annotations

import logging

STAGES = logging.getLogger("infer.stage")
"""Logger whose lines are the stages."""


def begin_stage(text: str) -> None:
    """Say what begins now, such as "loading the weights"."""
    STAGES.debug("%s", text)


def send_stages() -> None:
    """Have this process log its stages whatever the level of the rest; for a process whose lines
    are read by its parent, which shows them or does not."""
    STAGES.setLevel(logging.DEBUG)
