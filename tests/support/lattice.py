"""The prompts and the sampling of the lattices: every way of computing gives the same tokens."""

from __future__ import annotations

from typing import Any

from infer import SamplingParams
from infer.engine.core import EngineCore

OPENING = "Once upon a time there was a small fox who lived near the river. "


PROMPTS = [
    OPENING + "The fox had a red ball and a best friend.",
    OPENING + "One day the fox found a key under a stone, and did not know what it was for.",
    "Once upon a time",
    "One day, a little bird",
    OPENING * 4,
    OPENING * 4 + "But that was long ago.",
    "{",
    "7 + 5 =",
]


NUM_TOKENS = 16


def params(i: int) -> SamplingParams:
    if i % 2:
        return SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    return SamplingParams(
        temperature=0.9, top_p=0.9, seed=i, max_tokens=NUM_TOKENS - i, ignore_eos=True
    )


def preempt_at_every_third_step(core: EngineCore) -> None:
    """Make a core preempt a running sequence, another one in turn, before every third step."""
    scheduler, step, count = core.scheduler, core.step, 0

    def stepping(*, flush: bool = False) -> Any:
        nonlocal count
        count += 1
        if count % 3 == 0 and scheduler.running:
            scheduler.preempt(scheduler.running[count % len(scheduler.running)])
        return step(flush=flush)

    core.step = stepping  # type: ignore[method-assign]
