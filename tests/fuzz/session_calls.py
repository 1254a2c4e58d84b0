"""What clients do with sessions, in any order: `calls()` makes sequences of calls on their ids."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from tests.fuzz.call import MODEL, Call, CallSequence, id_of
from tests.fuzz.chats import messages
from tests.fuzz.endpoints import IDS, TEXTS

WHOLE = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


def calls() -> SearchStrategy[CallSequence]:
    """A session is made, and then up to eight things are done with it, or with others."""
    ids = st.one_of(st.integers(0, 2).map(id_of), st.integers(0, 2).map(id_of), IDS)
    some = st.one_of(st.just(WHOLE), messages())
    numbers = st.sampled_from([0, 1, 2, 3, 1024, -1, 2**63, None, "1", 0.5])

    def made(body: dict[str, Any]) -> Call:
        return Call("POST", "/v1/sessions", body)

    def chat(name: str, said: list[Any], more: dict[str, Any]) -> Call:
        body = {"model": MODEL, "max_tokens": 4, "messages": said, "session_id": name, **more}
        return Call("POST", "/v1/chat/completions", body)

    options = st.fixed_dictionaries(
        {},
        optional={
            "stream": st.booleans(),
            "n": st.integers(1, 2),
            "continue_final_message": st.booleans(),
            "tools": st.just([{"type": "function", "function": {"name": "f"}}]),
            "tool_choice": st.sampled_from(["required", "none", "auto"]),
            "timeout": st.sampled_from([0.001, 5]),
        },
    )
    asked = st.one_of(st.just(WHOLE[:1]), messages())
    body = st.fixed_dictionaries({}, optional={"title": TEXTS, "messages": some})
    path = ids.map(lambda name: f"/v1/sessions/{_quoted(name)}")
    step = st.one_of(
        st.builds(chat, ids, asked, options),
        st.builds(chat, ids, asked, options),
        body.map(made),
        st.builds(lambda it: Call("GET", it), path),
        st.just(Call("GET", "/v1/sessions")),
        st.builds(lambda it, title: Call("PATCH", it, {"title": title}), path, TEXTS),
        st.builds(lambda it, at: Call("POST", it + "/fork", {"at": at}), path, numbers),
        st.builds(lambda it: Call("DELETE", it), path),
    )
    return st.builds(
        lambda first, more: CallSequence((first, *more)),
        body.map(made), st.lists(step, min_size=1, max_size=8),
    )  # fmt: skip


def _quoted(name: str) -> str:
    return quote(name, safe="~")
