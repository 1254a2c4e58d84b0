"""Suspects after a crash, and the request that caused it: each case of `replicas.blame`."""

from __future__ import annotations

import signal

import pytest

from infer import SamplingParams
from infer.replicas.blame import (
    MAX_FROM_OUTSIDE,
    MAX_ISOLATED_CRASHES,
    CrashHistory,
    was_from_outside,
)
from infer.types import Request


@pytest.mark.parametrize(
    ("num_crashes", "num_resumed", "num_output", "suspected"),
    [(0, 0, 0, False), (0, 0, 3, False), (1, 0, 0, True), (1, 0, 1, False), (2, 4, 4, True)],
)
def test_a_request_is_a_suspect_until_it_samples_a_token(
    num_crashes: int, num_resumed: int, num_output: int, suspected: bool
) -> None:
    request = Request(
        *("a", (1,), SamplingParams(), 0, 9),
        output_token_ids=(5,) * num_resumed,
        num_crashes=num_crashes,
    )
    assert request.is_suspect(num_output) is suspected


def test_only_a_kill_that_is_not_ours_is_from_outside() -> None:
    assert was_from_outside(-signal.SIGKILL, killed_by_us=False)
    assert not was_from_outside(-signal.SIGKILL, killed_by_us=True)
    for code in (0, 1, -signal.SIGSEGV, -signal.SIGABRT):
        assert not was_from_outside(code, killed_by_us=False)


@pytest.mark.parametrize("from_outside", [False, True])
def test_who_is_alone_often_enough_is_to_blame(from_outside: bool) -> None:
    history = CrashHistory()
    for _ in range(10):
        history.record_crash(isolated=False)
        assert not history.is_to_blame(from_outside=from_outside)
    limit = MAX_FROM_OUTSIDE if from_outside else MAX_ISOLATED_CRASHES
    for number in range(1, limit + 1):
        history.record_crash(isolated=True)
        assert history.is_to_blame(from_outside=from_outside) == (number == limit)
    history.record_token()
    assert not history.is_to_blame(from_outside=from_outside)
    assert history.num_crashes == 10 + limit
