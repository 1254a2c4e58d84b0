"""The calls of the other modules for a server of two models, one of them, none, or another."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from tests.fuzz import endpoints, grammars, session_calls, texts
from tests.fuzz.call import MODEL, Call, CallSequence

OTHER = "other"
NAMES = [MODEL, OTHER, OTHER, "gone", "", None, 5]


def for_model(call: Call, name: object) -> Call:
    """The call, to a model: named in the body, or in the query where there is no body."""
    if isinstance(call.body, dict):
        return replace(call, body={**call.body, "model": name})
    if call.body == b"" and name is not None and "?" not in call.path:
        return replace(call, path=f"{call.path}?model={name}")
    return call


def calls() -> SearchStrategy[Call | CallSequence]:
    """Each call for a model of its own, in a sequence too."""
    names = st.lists(st.sampled_from(NAMES), min_size=1, max_size=4)

    def named(made: Call | CallSequence, names: list[object]) -> Call | CallSequence:
        if isinstance(made, Call):
            return for_model(made, names[0])
        calls = enumerate(made.calls)
        return CallSequence(tuple(for_model(it, names[i % len(names)]) for i, it in calls))

    some = st.one_of(endpoints.calls(), endpoints.calls(), grammars.calls(), texts.calls(),
                     session_calls.calls())  # fmt: skip
    return st.builds(named, some, names)
