"""A policy of the user's: what is no order is refused at the start, and later changes no token."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest

from infer.engine.core import EngineCore
from infer.errors import ConfigError
from infer.schedule.policy import fcfs, find_policy
from infer.schedule.sequence import Sequence
from infer.types import Request, Sampling
from tests.support.hash_engine import make_hash_core, solo

ODD: dict[str, Callable[[list[Sequence]], object]] = {
    "nobody": lambda seated: [],
    "the first only": lambda seated: seated[:1],
    "each twice": lambda seated: [sequence for sequence in seated for _ in range(2)],
    "one twice, one not at all": lambda seated: [seated[0], *seated[:-1]],
    "strangers": lambda seated: [object() for _ in seated],
    "nothing": lambda seated: None,
    "its list, emptied": lambda seated: seated.clear() or seated,  # type: ignore[func-returns-value]
    "an iterator": iter,
    "a tuple": tuple,
    "numbers": lambda seated: list(range(len(seated))),
    "an error": lambda seated: vars(seated[0].request)["oops"],
    "a mistake": lambda seated: seated.request_id,  # type: ignore[attr-defined]
    "an attribute that is not there": lambda seated: sorted(seated, key=lambda s: s.length),  # type: ignore[attr-defined]
}
"""Name → a function that orders nothing."""
is_odd = False
"""Whether `later` is odd now."""
kind = ""


def always(seated: list[Sequence]) -> object:
    return ODD[kind](seated)


def later(seated: list[Sequence]) -> object:
    return ODD[kind](seated) if is_odd else fcfs(seated)


def in_place(seated: list[Sequence]) -> list[Sequence]:
    seated.sort(key=lambda sequence: -sequence.arrival)
    return seated


@pytest.mark.parametrize("odd", ODD)
def test_what_is_no_order_is_refused_at_the_start(odd: str, monkeypatch: Any) -> None:
    monkeypatch.setitem(globals(), "kind", odd)
    with pytest.raises(ConfigError, match=r"scheduler_policy: .*does not order sequences"):
        find_policy(f"{__name__}:always")


@pytest.mark.parametrize("odd", ODD)
def test_later_it_changes_no_token_and_is_told(odd: str, monkeypatch: Any, caplog: Any) -> None:
    monkeypatch.setitem(globals(), "kind", odd)
    core = make_hash_core(scheduler_policy=f"{__name__}:later", max_num_batched_tokens=3)
    monkeypatch.setitem(globals(), "is_odd", True)
    with caplog.at_level(logging.ERROR, "infer.schedule.policy"):
        check_tokens(core)
    told = [record.getMessage() for record in caplog.records]
    assert "scheduler_policy 'tests.schedule.test_own_policy:later' failed 1 times" in told[0]
    assert len(told) < 10, "not each step"


def test_what_it_gets_is_its_own() -> None:
    check_tokens(make_hash_core(scheduler_policy=f"{__name__}:in_place", max_num_batched_tokens=3))


def check_tokens(core: EngineCore) -> None:
    """Requests of several lengths have the tokens that they have alone."""
    requests = [
        Request(f"r{i}", tuple(range(i, 2 * i + 3)), Sampling(temperature=0), 0, 12)
        for i in range(8)
    ]
    tokens: dict[str, list[int | None]] = {request.request_id: [] for request in requests}
    for request in requests:
        core.add(request)
    num_steps = 0
    while core.has_work:
        num_steps += 1
        assert num_steps < 500
        for output in core.step():
            tokens[output.request_id].append(output.token_id)
    size = core.runner.vocab_size  # type: ignore[attr-defined]
    assert tokens == {request.request_id: solo(request, size) for request in requests}
