"""Texts and ids for the routes that tokenise, decode or render, and echoed prompts: `calls()`."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from tests.fuzz.call import MODEL, Call
from tests.fuzz.chats import messages, tool_definitions

PIECES = [
    "<|end|>", "<|user|>", "<|", "|>", "<s>", "＜|end|＞", "\u200b", "\u2028", "\ufeff", "\x00",
    "\U0001f469\u200d\U0001f469\u200d\U0001f467", "e\u0301", "\u1112\u1161\u11ab", "日本", "\u202e",
    " ", "\n", "\t", "0", "a", "ß", "{{ x }}", "{% raw %}", "'", '"', "\\",
]  # fmt: skip
MAX_REPEATS = 20_000


def texts() -> SearchStrategy[str]:
    """Of any characters, and pieces that are repeated up to 20,000 times."""
    counts = st.one_of(st.integers(0, 20), st.integers(0, MAX_REPEATS))
    repeated = st.builds(lambda piece, n: piece * n, st.sampled_from(PIECES), counts)
    one = st.one_of(st.text(max_size=40), st.sampled_from(PIECES), repeated)
    return st.lists(one, max_size=5).map("".join)


def calls() -> SearchStrategy[Call]:
    """Tokenise, decode, render, and complete with the prompt's own tokens in the answer."""
    model = {"model": st.sampled_from([MODEL, None])}
    flags = {name: st.booleans() for name in ("add_special_tokens", "parse_special_tokens")}
    ids = st.lists(
        st.one_of(st.integers(0, 2100), st.sampled_from([-1, 2**31, 2**63, 10**30])), max_size=300
    )
    conversation = {
        "tools": tool_definitions(),
        "add_generation_prompt": st.booleans(),
        "continue_final_message": st.booleans(),
    }
    said = st.lists(st.builds(lambda text: {"role": "user", "content": text}, texts()), min_size=1,
                    max_size=2)  # fmt: skip
    heard = st.one_of(messages(), said)
    echoed: dict[str, SearchStrategy[Any]] = {
        "echo": st.booleans(),
        "logprobs": st.integers(0, 20),
        "prompt_logprobs": st.integers(0, 20),
        "return_token_ids": st.booleans(),
        "stop": texts().map(lambda text: text[:200]),
        "bad_words": st.lists(texts().map(lambda text: text[:100]), max_size=3),
    }

    def post(
        path: str,
        needed: dict[str, SearchStrategy[Any]],
        optional: dict[str, SearchStrategy[Any]],
        **fields: Any,
    ) -> SearchStrategy[Call]:
        body = st.fixed_dictionaries(needed, optional={**model, **optional})
        return body.map(lambda it: Call("POST", path, {**fields, **it}))

    prompts = st.one_of(texts(), st.lists(texts(), max_size=3), ids, st.lists(ids, max_size=2))
    return st.one_of(
        post("/tokenize", {"prompt": texts()}, {**flags, "return_token_strs": st.booleans()}),
        post("/tokenize", {"messages": heard}, conversation),
        post("/detokenize", {"tokens": ids}, {}),
        post("/v1/chat/completions/render", {"messages": heard}, conversation),
        post("/v1/completions", {"prompt": prompts}, echoed, max_tokens=2),
    )
