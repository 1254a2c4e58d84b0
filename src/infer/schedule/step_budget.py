"""`StepBudget`: how many prompt tokens may ride along with running streams, learned from step
times.

Assumed of the machine: beside the same streams n prompt tokens take a time(n) that never shrinks
with n, while time(n) / n never grows (a step reads the weights and decodes the streams anyway). So
if n tokens took t, n · T / t tokens take at most T: a limit that is scaled by T / t after each step
rises to the right one without passing it, and falls at once when a step took too long. A token
costs more the more context it attends to, at most in proportion: there is a limit for each power
of two of context, and the first guess for one that was never met is half of the one before it.
Used by the scheduler if `max_step_ms` is set. Knows no clock: it is told how long a step took.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from infer.schedule.sequence import Advanced

MIN_CHUNK = 16
"""prompt tokens that may always ride along, or prompts would starve; also the cautious start"""
AIM = 0.9
"""share of the bound that is aimed at: the rest is for what differs from step to step"""
MAX_FACTOR = 2.0
"""the most that a limit grows by in one step; a single slow step shrinks it by no more either"""
SMALL_CONTEXT = 10
"""below 2 ** 10 tokens attention is a small part of a token's cost: one limit for all of them"""


class StepBudget:
    """See the module's docstring."""

    def __init__(self, max_step_ms: float) -> None:
        self.max_step_ms = max_step_ms
        self._limits: dict[int, float] = {}

    def limit(self, context: int) -> int:
        """Prompt tokens for a step that decodes, if the last of them attend to so much context."""
        return int(self._limit(_band(context)))

    def _limit(self, band: int) -> float:
        limits = self._limits
        if band in limits:
            return limits[band]
        lower = max((known for known in limits if known < band), default=None)
        if lower is not None:
            return max(limits[lower] / 2.0 ** (band - lower), MIN_CHUNK)
        return limits[min(limits)] if limits else MIN_CHUNK

    def record(self, step: Seq[Advanced], step_ms: float) -> None:
        """Learn from a step; one without streams or without prompts is ignored."""
        prompts = [advanced.chunk for advanced in step if advanced.is_prompt]
        if not prompts or len(prompts) == len(step):
            return
        num_tokens = sum(chunk.num_tokens for chunk in prompts)
        band = _band(max(chunk.start for chunk in prompts))
        limit, aim_ms = self._limit(band), AIM * self.max_step_ms
        found = num_tokens * aim_ms / max(step_ms, 1e-3)
        if num_tokens < int(limit) and step_ms <= aim_ms:
            found = max(found, limit)  # a small step in time says nothing against a larger one
        found = min(max(found, limit / MAX_FACTOR, MIN_CHUNK), limit * MAX_FACTOR)
        # More context never allows more.
        for other, value in self._limits.items():
            self._limits[other] = min(value, found) if other > band else max(value, found)
        self._limits[band] = found


def _band(context: int) -> int:
    return max(context.bit_length(), SMALL_CONTEXT)
