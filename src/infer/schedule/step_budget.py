"""`StepBudget`: how many prompt tokens a step with streams may compute, learned from step times"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from infer.schedule.sequence import Advanced

MIN_CHUNK = 16
"""Prompt tokens that always fit, because prompts would starve otherwise; also the first limit."""
AIM = 0.9
"""Fraction of `max_step_ms` that is aimed at; the rest allows for variation between steps."""
MAX_FACTOR = 2.0
"""Largest factor by which one step may raise or lower a limit."""
SMALL_CONTEXT = 10
"""log2 of the context (tokens) below which all contexts share one limit, because attention is a
small part of the cost there."""


class StepBudget:
    """The assumption about the machine: with the same streams, the time(n) of a step with n prompt
    tokens never decreases with n, and time(n) / n never increases (a step reads the weights and
    decodes the streams anyway). So if n tokens took t, n · T / t tokens take at most the bound T. A
    limit scaled by T / t after each step therefore rises to the right value without exceeding it,
    and falls at once when a step took too long. The cost of a token grows with the context it
    attends to, at most in proportion. There is one limit for each power of two of context; the
    first guess for a new one is half the limit of the power below. The scheduler uses this if
    `max_step_ms` is set. It has no clock: `record` gets the time that a step took."""

    def __init__(self, max_step_ms: float) -> None:
        self.max_step_ms = max_step_ms
        self._limits: dict[int, float] = {}

    def limit(self, context: int) -> int:
        """Maximum number of prompt tokens in a step that also decodes, if the last of them attend
        to `context` tokens."""
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
        """Learn from a step that took `step_ms` milliseconds; a step without streams or without
        prompts is ignored."""
        prompts = [advanced.chunk for advanced in step if advanced.is_prompt]
        if not prompts or len(prompts) == len(step):
            return
        num_tokens = sum(chunk.num_tokens for chunk in prompts)
        band = _band(max(chunk.start for chunk in prompts))
        limit, aim_ms = self._limit(band), AIM * self.max_step_ms
        fitting = num_tokens * aim_ms / max(step_ms, 1e-3)
        if num_tokens < int(limit) and step_ms <= aim_ms:
            fitting = max(
                fitting, limit
            )  # a small step within the bound says nothing of larger ones
        fitting = min(max(fitting, limit / MAX_FACTOR, MIN_CHUNK), limit * MAX_FACTOR)
        # More context never allows more.
        for other, value in self._limits.items():
            self._limits[other] = min(value, fitting) if other > band else max(value, fitting)
        self._limits[band] = fitting


def _band(context: int) -> int:
    return max(context.bit_length(), SMALL_CONTEXT)
