"""A few calls of the fuzzer on a real server; hours of them: `python tests/fuzz/run.py`."""

from __future__ import annotations

import pytest

from tests.fuzz.call import Call
from tests.fuzz.run import run, strategy_of, try_calls


def test_nothing_breaks_a_server() -> None:
    found = run(["grammars", "chats"], 2, 18, max_calls=8)
    assert found["calls"] == {"grammars": 8, "chats": 8}


def test_a_call_that_breaks_something_is_made_small() -> None:
    def check(call: Call) -> None:
        assert b"guided" not in call.content

    strategy = strategy_of("grammars")
    assert strategy is not None
    with pytest.raises(AssertionError) as caught:
        try_calls(check, strategy, 100, 1)
    told = "\n".join(getattr(caught.value, "__notes__", ()))
    assert "guided_" in told
    assert len(told) < 1500


def test_calls_are_sent_as_they_say() -> None:
    assert Call("POST", "/x", {"a": "é"}).content == b'{"a": "\\u00e9"}'
    assert Call("POST", "/x", {"a": 1}).sent_headers == {"Content-Type": "application/json"}
    assert Call("GET", "/x").content == b""
    assert Call("POST", "/x", b"{", {"A": "b"}).sent_headers == {"A": "b"}
