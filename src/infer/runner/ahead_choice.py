"""`AheadChoice`: whether working ahead makes steps shorter, learned from their times"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

MARGIN = 0.97
"""Factor by which the other way must shorten steps to be taken."""
SETTLING_STEPS = 3
"""Number of steps after a change whose times are not counted."""
TIMED_STEPS = 9
"""Number of steps that are timed each way."""
NEARLY = 8
"""Inverse of the fraction by which numbers of sequences differ that are nearly the same."""
STEPS_BEFORE = 16
"""Number of steps of a load before its first trial."""
STEPS_BETWEEN = 1024
"""Number of steps of a load from one trial to the next."""


@dataclass(slots=True)
class _Load:
    is_ahead: bool = False
    num_left: int = STEPS_BEFORE
    """Number of steps until the next trial."""


@dataclass(slots=True)
class _Trial:
    num_rows: int
    is_ahead: bool
    """The way that is measured now."""
    num_steps: int = 0
    """Number of steps of this way without a pause."""
    times: dict[bool, list[float]] = field(default_factory=lambda: {False: [], True: []})


class AheadChoice:
    """While the kernels compute, scheduling and packing the next step take a core from them if
    there is none to spare. What is faster depends on the machine, its company, the model and the
    number of sequences, so it is measured. A trial compares the medians of some steps one way with
    those of as many the other way, of nearly the same number of sequences. The other way is taken
    if it is clearly faster: working ahead has newcomers wait for one step more. There is a trial
    when a load is new, and then now and then. Loads are numbers of sequences, in powers of two.
    Steps with prompts do not go ahead. An `AheadRunner` has one choice."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        """`clock` gives seconds."""
        self._clock = clock
        self._began_s = clock()
        self._loads: dict[int, _Load] = {}
        self._trial: _Trial | None = None

    def __call__(self, num_rows: int) -> bool:
        """Whether the step that begins now, of `num_rows` sequences that decode, is launched before
        the one before is committed; 0: there are also prompts, or nothing runs."""
        now_s = self._clock()
        took_s, self._began_s = now_s - self._began_s, now_s
        trial = self._trial
        if not num_rows:
            if trial is not None:
                trial.num_steps = 0  # the next steps settle again
            return False
        load = self._loads.setdefault(num_rows.bit_length(), _Load())
        if trial is not None and NEARLY * abs(trial.num_rows - num_rows) <= trial.num_rows:
            return self._go_on(trial, self._loads[trial.num_rows.bit_length()], took_s)
        load.num_left -= 1
        self._trial = _Trial(num_rows, load.is_ahead) if load.num_left < 0 else None
        return load.is_ahead

    def _go_on(self, trial: _Trial, load: _Load, took_s: float) -> bool:
        trial.num_steps += 1
        times = trial.times[trial.is_ahead]
        if trial.num_steps > SETTLING_STEPS:
            times.append(took_s)
        if len(times) < TIMED_STEPS:
            return trial.is_ahead
        if trial.is_ahead == load.is_ahead:
            trial.is_ahead, trial.num_steps = not trial.is_ahead, 0
            return trial.is_ahead
        if median(times) < MARGIN * median(trial.times[load.is_ahead]):
            load.is_ahead = trial.is_ahead
        load.num_left, self._trial = STEPS_BETWEEN, None
        return load.is_ahead
