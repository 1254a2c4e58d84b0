"""The memory of compiled grammars, of which each key may have some."""

from __future__ import annotations

import dataclasses
from contextlib import ExitStack

import pytest

from infer.errors import OverloadedError
from infer.server.http.error_responses import HttpError
from infer.server.tenancy.open_grammars import OpenGrammars
from infer.types import Request
from infer.types.grammar import Grammar
from infer.types.sampling import Sampling
from infer.types.server_limits import ServerLimits


def request(name: str, mib: float) -> Request:
    sampling = Sampling(grammar=Grammar.regex(name) if name else None)
    num_bytes = int(mib * (1 << 20))
    return Request("id", (1,), sampling, seed=1, max_tokens=1, grammar_bytes=num_bytes)


def test_a_keys_requests_with_one_grammar_count_once() -> None:
    grammars = OpenGrammars(ServerLimits(max_grammar_mib=20, max_grammar_mib_of_key=10))
    with ExitStack() as second:
        with ExitStack() as first:
            grammars.enter("a", [request("x", 6), request("x", 6)], first)
            grammars.enter("a", [request("x", 6)], second)
            with pytest.raises(HttpError, match="10 MiB of compiled grammars") as refused:
                grammars.enter("a", [request("y", 5)], first)
            assert refused.value.status == 429
        with pytest.raises(HttpError):  # the second request still has it
            grammars.enter("a", [request("y", 5)], second)
    with ExitStack() as third:
        grammars.enter("a", [request("y", 10)], third)


def test_small_grammars_and_none_are_free() -> None:
    grammars = OpenGrammars(ServerLimits(max_grammar_mib=1, max_grammar_mib_of_key=1))
    with ExitStack() as cleanup:
        for i in range(50):
            grammars.enter("a", [request(f"{i}", 0.99), request("", 0)], cleanup)


def test_each_key_gets_one_of_any_size_and_callers_without_a_key_what_is_left() -> None:
    grammars = OpenGrammars(ServerLimits(max_grammar_mib=20, max_grammar_mib_of_key=10))
    with ExitStack() as cleanup:
        for key in "abc":
            grammars.enter(key, [request(key, 15)], cleanup)
        with pytest.raises(OverloadedError, match="too much memory"):
            grammars.enter("", [request("x", 1)], cleanup)
    with ExitStack() as cleanup:
        grammars.enter("", [request("x", 12)], cleanup)
        grammars.enter("", [dataclasses.replace(request("y", 8), seed=2)], cleanup)
