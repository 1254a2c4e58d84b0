"""The limits of a key over several fronts: what one front would let in, whatever fails."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from itertools import product
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infer.server.tenancy import front_limits, limit_authority, limits
from infer.server.tenancy.front_limits import ANSWER_S
from infer.server.tenancy.keys import KeyLimits
from tests.support import limited_fronts
from tests.support.cases import one_of, slow_but
from tests.support.limited_fronts import (
    NUM_FRONTS,
    Admitted,
    Arrival,
    Fault,
    admitted_by,
    arrivals,
)
from tests.support.server_process import Findings

LIMITS = KeyLimits(requests_per_minute=600, tokens_per_minute=60_000, max_concurrent=10_000)
LASTS_S = 90.0
LOADS = {
    "many requests": {"per_s": 25.0, "max_tokens": 60},
    "many tokens": {"per_s": 15.0, "max_tokens": 400},
}
"""The first is held by the bucket of requests, the second by that of tokens."""


@cache
def load_of(name: str, skew: float = 0.25) -> list[Arrival]:
    return arrivals(seed=1, lasts_s=LASTS_S, skew=skew, **LOADS[name])  # type: ignore[arg-type]


@cache
def alone(name: str, skew: float = 0.25) -> Admitted:
    """What one front lets in."""
    return admitted_by(LIMITS, load_of(name, skew), is_alone=True)


def ratios(name: str, faults: tuple[Fault, ...] = (), skew: float = 0.25) -> tuple[float, float]:
    """Requests and tokens that four fronts let in, by those of one."""
    one, four = alone(name, skew), admitted_by(LIMITS, load_of(name, skew), faults)
    assert four.longest_wait_s <= ANSWER_S + 0.001
    return four.num_requests / one.num_requests, four.num_tokens / one.num_tokens


@cache
def sound_ratios(name: str, faults: tuple[Fault, ...] = (), skew: float = 0.25) -> Any:
    """`ratios` of the product as it is: several tests ask for the same ones."""
    return ratios(name, faults, skew)


def note(load: str, by_requests: float, by_tokens: float) -> None:
    """Write what was let in, by one front's, into the scorecard's row."""
    name = "admitted by four fronts, by one front's"
    Findings().note("C1", name, load, requests=round(by_requests, 3), tokens=round(by_tokens, 3))


@pytest.mark.parametrize(("skew", "name"), one_of(3, product([0.25, 0.9], LOADS)))
def test_four_fronts_let_in_what_one_does(skew: float, name: str) -> None:
    assert alone(name).num_requests < 0.9 * len(load_of(name)), "the limits decide nothing"
    by_requests, by_tokens = sound_ratios(name, skew=skew)
    note(f"{name}, {skew:.0%} at one front", by_requests, by_tokens)
    held = by_requests if name == "many requests" else by_tokens
    assert abs(held - 1) <= 0.02
    assert abs(by_requests - 1) <= 0.03
    assert abs(by_tokens - 1) <= 0.03


@pytest.mark.parametrize(
    ("at_s", "name"),
    [*one_of(2, product([0.0, 5.0], LOADS)), *one_of(2, product([0.6, 50.0], LOADS), first=1)],
)
def test_without_the_authority_each_has_its_share(at_s: float, name: str) -> None:
    found = sound_ratios(name, (Fault("no authority", at_s, 1000),))
    note(f"{name}, no authority from {at_s:g} s on", *found)
    for ratio in found:
        assert 0.9 <= ratio <= 1.25


FAULTS = st.builds(
    Fault,
    st.sampled_from(["authority dies", "no authority", "slow", "questions lost", "answers lost"]),
    st.floats(0, LASTS_S),
    st.floats(0.01, 40),
)
OF_ONE = st.builds(
    Fault,
    st.sampled_from(["slow", "questions lost", "answers lost", "front dies"]),
    st.floats(0, LASTS_S),
    st.floats(0.01, 40),
    st.just(0),
)


@settings(max_examples=4, deadline=None)
@given(st.sampled_from(sorted(LOADS)), st.lists(FAULTS | OF_ONE, min_size=1, max_size=4))
def test_no_failure_lets_in_more_than_a_quarter_more(name: str, faults: list[Fault]) -> None:
    for ratio in ratios(name, tuple(faults)):
        assert 0.7 <= ratio <= 1.25  # below 0.75 where a front is dead all the time


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_no_failure_lets_in_more_for_longer() -> None:
    most = [0.0, 0.0]

    @settings(max_examples=120, deadline=None)
    @given(
        st.sampled_from(sorted(LOADS)),
        st.lists(FAULTS | OF_ONE, min_size=1, max_size=8),
        st.sampled_from([0.25, 0.6]),
    )
    def fail(name: str, faults: list[Fault], skew: float) -> None:
        found = ratios(name, tuple(faults), skew)
        most[:] = map(max, most, found)
        assert max(found) <= 1.25

    fail()
    note("the most of 120 runs with 1 to 8 failures", *most)


# ---- open requests

SLOW = arrivals(seed=2, lasts_s=20, per_s=40, max_tokens=40)
PLACES = KeyLimits(max_concurrent=12)


def test_open_requests_of_all_fronts_are_counted_together() -> None:
    four, one = admitted_by(PLACES, SLOW), admitted_by(PLACES, SLOW, is_alone=True)
    assert four.most_open == one.most_open == 12
    assert abs(four.num_requests / one.num_requests - 1) <= 0.02
    away = admitted_by(PLACES, SLOW, [Fault("no authority", 0, 1000)])
    assert away.most_open <= 12


def test_a_front_that_dies_leaves_no_open_requests() -> None:
    faults = [Fault("front dies", 2, front=front) for front in range(NUM_FRONTS)]
    after = [each for each in SLOW if each.at_s > 6]
    four = admitted_by(PLACES, [each for each in SLOW if not 1.9 < each.at_s < 6], faults)
    alone_after = admitted_by(PLACES, after, is_alone=True)
    before = admitted_by(PLACES, [each for each in SLOW if each.at_s < 1.9], is_alone=True)
    expected = alone_after.num_requests + before.num_requests
    assert abs(four.num_requests / expected - 1) <= 0.05


# ---- what must be noticed


LOSSES = tuple(Fault("answers lost", at_s, 0.5) for at_s in range(5, 90, 3))
SLOWNESS = tuple(Fault("slow", at_s, 0.4) for at_s in range(4, 90, 2))
DEATHS = tuple(Fault("authority dies", at_s) for at_s in range(10, 90, 8))
ABSENCE = (Fault("no authority", 50, 1000),)  # no bucket is full any more
Break = tuple[ModuleType, str, str, tuple[Fault, ...]]
BREAKS: dict[str, Break] = {
    "what was granted in a lost answer is gone": (
        limit_authority, "if said.confirmed < front.number:", "if False:", LOSSES,
    ),
    "shares that begin full": (
        front_limits, "share.take((bucket.size - bucket.level()) / self._num_fronts)", "pass",
        ABSENCE,
    ),
    "all of the limit in place of a share": (
        front_limits, "False, self._num_fronts, 0", "False, 1, 0", ABSENCE,
    ),
    "nothing is given back": (
        front_limits, "self._note(BucketChange(key, bucket, per_minute, amount))", "pass", (),
    ),
    "what was granted and not used is gone": (
        limits, "if not grant.is_used:", "if False:", (),
    ),
    "what was granted too late is gone": (
        front_limits, "self._release(pending.ask, verdict)  # ", "pass  # ", SLOWNESS,
    ),
    "no deadline": (front_limits, "loop.call_later(ANSWER_S, ", "loop.call_later(9.0, ", SLOWNESS),
    "a new authority begins full": (
        front_limits, "if (missing := share.size - share.level()) > 0:",
        "if (missing := share.size - share.level()) > 1e9:", DEATHS,
    ),
}  # fmt: skip


QUICK = list(BREAKS)[:2]


def is_right(faults: tuple[Fault, ...], found_by: Callable[..., Any] = ratios) -> bool:
    try:
        for name in LOADS:
            for ratio in found_by(name, faults):
                assert 0.97 <= ratio <= 1.25
    except AssertionError:
        return False
    return True


@pytest.mark.parametrize("name", BREAKS)
def test_what_is_broken_is_there_once(name: str) -> None:
    module, old, _, _ = BREAKS[name]
    assert inspect.getsource(module).count(old) == 1


@pytest.mark.parametrize("name", slow_but(QUICK, BREAKS))
def test_broken_limits_are_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, old, new, faults = BREAKS[name]
    assert is_right(faults, sound_ratios)
    source = inspect.getsource(module)
    names: dict[str, Any] = {"__name__": module.__name__}
    exec(compile(source.replace(old, new), name, "exec"), names)
    for each in {"FrontLimits", "Tenant", "LimitAuthority"} & names.keys():
        monkeypatch.setattr(limited_fronts, each, names[each])
    assert not is_right(faults)
