"""The driver: planned arrivals, closed loops, what waits for what, and what counts as an error."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from infer.bench.drive import Drive, Failure, Piece, Prompt, Record, Usage
from infer.bench.workloads import Planned
from infer.errors import OverloadedError

STEP_S = 0.01


class Echo:
    """Answers one request at a time, a token each `STEP_S`; the tokens count up from 100."""

    def __init__(self, seats: int = 1, fail: dict[int, Exception] | None = None) -> None:
        self.seen: list[Prompt] = []
        self.most = self._now = 0
        self._seats = asyncio.Semaphore(seats)
        self._fail = fail or {}

    def prompt(self, planned: Prompt) -> Prompt:
        return planned

    async def send(
        self, prompt: Prompt, output_len: int, temperature: float = 0.0
    ) -> AsyncGenerator[Piece, None]:
        number = len(self.seen)
        self.seen.append(prompt)
        self._now += 1
        self.most = max(self.most, self._now)
        try:
            async with self._seats:
                for i in range(output_len):
                    await asyncio.sleep(STEP_S)
                    if i == 1 and number in self._fail:
                        raise self._fail[number]
                    yield Piece(1, (100 + i,))
                yield Piece(usage=Usage(len(prompt), output_len, 0))
        finally:
            self._now -= 1


def drive(plan: list[Planned], target: Echo, **how: Any) -> list[Record]:
    return asyncio.run(Drive(plan, target, **how).run())


def test_latency_counts_from_the_planned_arrival() -> None:
    """Three arrive at once where one is answered at a time: the wait is part of the latency."""
    records = drive([Planned(0.05, (1,), 5)] * 3, Echo())
    assert [record.arrival_s for record in records] == [0.05] * 3
    first, second, third = sorted(record.ttft_s for record in records)
    assert first >= STEP_S
    assert second >= 6 * STEP_S
    assert third >= 11 * STEP_S
    assert all(record.e2e_s > record.ttft_s for record in records)


def test_a_busy_loop_does_not_move_the_planned_arrival() -> None:
    """The driver itself comes late; the request does not look fast for it."""

    class Blocking(Echo):
        def prompt(self, planned: Prompt) -> Prompt:
            import time

            time.sleep(0.05)
            return planned

    records = drive([Planned(0.0, (1,), 1)] * 4, Blocking(seats=4))
    assert [record.arrival_s for record in records] == [0.0] * 4
    assert max(record.sent_s for record in records) >= 0.15
    assert max(record.ttft_s for record in records) >= 0.2


def test_a_closed_loop_has_so_many_in_flight() -> None:
    target = Echo(seats=99)
    records = drive([Planned(0.0, (1,), 3)] * 7, target, concurrency=2)
    assert target.most == 2
    assert all(record.arrival_s == record.sent_s for record in records)
    assert len({round(record.arrival_s, 2) for record in records}) >= 4


def test_followers_wait_for_an_end_or_for_tokens() -> None:
    plan = [
        Planned(0.0, (1,), 6),
        Planned(0.02, (2,), 1, after=0),
        Planned(0.0, (3,), 1, after=0, after_tokens=3),
    ]
    first, after, during = drive(plan, Echo(seats=9))
    assert after.arrival_s >= first.end_s + 0.02
    assert first.token_s[2] <= during.arrival_s < first.end_s


def test_a_turn_holds_what_was_said_before() -> None:
    target = Echo()
    plan = [Planned(0.0, (1,), 2), Planned(0.0, (2,), 1, after=0, continues=True)]
    plan.append(Planned(0.0, (3,), 1, after=1, continues=True))
    records = drive(plan, target)
    assert target.seen == [(1,), (1, 100, 101, 2), (1, 100, 101, 2, 100, 3)]
    assert [record.prompt_tokens for record in records] == [1, 4, 6]


def test_errors_are_distinguished_and_end_nothing_else() -> None:
    target = Echo(9, {0: Failure("cut_off", "it broke"), 1: OverloadedError("no room")})
    plan = [Planned(0.0, (i,), 3) for i in range(3)]
    plan.append(Planned(0.0, (3,), 3, after=0, continues=True))
    plan.append(Planned(0.0, (4,), 3, after=1))
    ended = []
    records = drive(plan, target, on_end=lambda: ended.append(1))
    kinds = [record.error for record in records]
    assert kinds == ["cut_off", "OverloadedError", None, "skipped", None]
    assert records[0].message == "it broke"
    assert len(ended) == 5


def test_an_answer_that_takes_too_long_is_an_error() -> None:
    records = drive([Planned(0.0, (1,), 10_000), Planned(0.0, (1,), 2)], Echo(2), timeout_s=0.2)
    assert [record.error for record in records] == ["timeout", None]
    assert "0.2 s" in records[0].message


def test_an_answer_without_a_token_is_an_error() -> None:
    (record,) = drive([Planned(0.0, (1,), 0)], Echo())
    assert record.error == "empty"


def test_a_bug_is_not_counted_as_an_error_of_the_target() -> None:
    with pytest.raises(ZeroDivisionError):
        drive([Planned(0.0, (1,), 2)], Echo(1, {0: ZeroDivisionError()}))
