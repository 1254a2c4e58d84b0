"""Tests of the choice whether to work ahead, on a clock of their own."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from infer.runner import ahead_choice
from infer.runner.ahead_choice import STEPS_BEFORE, STEPS_BETWEEN, AheadChoice

TRIAL = 2 * (ahead_choice.SETTLING_STEPS + ahead_choice.TIMED_STEPS) + 2


class Machine:
    """Steps that take a time by their rows and by the way they are made."""

    def __init__(self, step_s: Callable[[int, bool], float]) -> None:
        self.now_s = 0.0
        self.step_s = step_s
        self.choice = AheadChoice(lambda: self.now_s)

    def step(self, num_rows: int) -> bool:
        is_ahead = self.choice(num_rows)
        self.now_s += self.step_s(num_rows, is_ahead)
        return is_ahead

    def steps(self, num_rows: int, count: int) -> list[bool]:
        return [self.step(num_rows) for _ in range(count)]


@pytest.mark.parametrize(("ahead_s", "wins"), [(0.9, True), (1.2, False), (0.99, False)])
def test_the_faster_way_is_taken_if_it_is_clearly_faster(ahead_s: float, wins: bool) -> None:
    machine = Machine(lambda rows, is_ahead: ahead_s if is_ahead else 1.0)
    before = machine.steps(32, STEPS_BEFORE)
    trial = machine.steps(32, TRIAL)
    after = machine.steps(32, STEPS_BETWEEN // 2)
    assert not any(before)
    assert set(trial) == {True, False}
    assert set(after) == {wins}


def test_each_load_has_its_own_way() -> None:
    machine = Machine(lambda rows, is_ahead: 2.0 if is_ahead == (rows < 8) else 1.0)
    for rows in (4, 64):
        machine.steps(rows, STEPS_BEFORE + TRIAL)
    assert set(machine.steps(5, 20)) == {False}
    assert set(machine.steps(70, 20)) == {True}
    assert set(machine.steps(4, 20)) == {False}


def test_a_machine_that_changes_is_noticed() -> None:
    machine = Machine(lambda rows, is_ahead: 0.8 if is_ahead else 1.0)
    machine.steps(32, STEPS_BEFORE + TRIAL)
    machine.step_s = lambda rows, is_ahead: 1.5 if is_ahead else 1.0
    machine.steps(32, STEPS_BETWEEN + TRIAL)
    assert set(machine.steps(32, 100)) == {False}


def test_trials_are_rare() -> None:
    machine = Machine(lambda rows, is_ahead: 1.5 if is_ahead else 1.0)
    assert sum(machine.steps(32, 20_000)) < 20_000 / 50


def test_steps_with_prompts_never_go_ahead_and_only_interrupt_a_trial() -> None:
    machine = Machine(lambda rows, is_ahead: 30.0 if not rows else 0.8 if is_ahead else 1.0)
    ways = set()
    for _ in range(100):
        assert not machine.step(0)
        ways |= set(machine.steps(32, 6))
    assert ways == {True, False}
    machine.steps(32, 10)
    assert set(machine.steps(32, 30)) == {True}


def test_numbers_of_sequences_that_differ_little_are_one_load() -> None:
    machine = Machine(lambda rows, is_ahead: (0.8 if is_ahead else 1.0) * (100 + rows))
    for i in range(STEPS_BEFORE + TRIAL):
        machine.step(60 - i // 20)
    assert set(machine.steps(58, 30)) == {True}


def test_one_late_step_decides_nothing() -> None:
    machine = Machine(lambda rows, is_ahead: 0.8 if is_ahead else 1.0)
    for i in range(STEPS_BEFORE + TRIAL):
        machine.step(32)
        machine.now_s += 50.0 * (i % 7 == 0)
    assert set(machine.steps(32, 30)) == {True}
