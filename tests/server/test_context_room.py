"""`max_tokens` beyond what the prompt leaves of the context is cut to it; a prompt has to fit.

Agents send the same large `max_tokens` in every request.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.cases import over
from tests.support.doubles import make_hash_llm
from tests.support.serving import CHAT, COMPLETIONS, ask, chat_body, check_refused, completion_body

SIZE = 256
LIMITS = (
    (COMPLETIONS, completion_body, "max_tokens"),
    (CHAT, chat_body, "max_tokens"),
    (CHAT, chat_body, "max_completion_tokens"),
)


@over("beyond", [0, 1, 32_000, 128_000, 2**31 - 1 - SIZE])
@over(("path", "body", "name"), LIMITS)
@over("more", [{}, {"stream": True}, {"n": 2}])
def test_a_limit_is_cut_to_what_is_left(
    path: str, body: Any, name: str, beyond: int, more: dict[str, Any]
) -> None:
    sent = body(ignore_eos=True, **more)
    del sent["max_tokens"]
    llm = make_hash_llm(max_seq_len=SIZE)
    num_prompt = ask(llm, path, {**body(), "max_tokens": 1}).json()["usage"]["prompt_tokens"]
    room, choices = SIZE - num_prompt, more.get("n", 1)
    if "stream" in more:
        sent["stream_options"] = {"include_usage": True}
    reply = ask(make_hash_llm(max_seq_len=SIZE), path, {**sent, name: room + beyond})
    assert reply.status == 200
    last = reply.events()[-1] if "stream" in more else reply.json()
    usage = {key: last["usage"][key] for key in ("prompt_tokens", "completion_tokens")}
    assert usage == {"prompt_tokens": num_prompt, "completion_tokens": room * choices}
    ended = reply.events()[-2] if "stream" in more else last
    assert {each["finish_reason"] for each in ended["choices"]} == {"length"}


@pytest.mark.parametrize("limit", [{}, {"max_tokens": 1}, {"max_tokens": 32_000}], ids=str)
def test_a_prompt_that_does_not_fit_is_refused_with_both_numbers(limit: dict[str, Any]) -> None:
    """Clients look for these words and numbers to know by how much to shorten a chat."""
    words = f"maximum context length is {SIZE} tokens"
    for size in (SIZE, SIZE + 1, 3 * SIZE):
        sent = {**completion_body(prompt=[1] * size), **limit}
        reply = ask(make_hash_llm(max_seq_len=SIZE), COMPLETIONS, sent)
        check_refused(reply, 400, "prompt", "context_length_exceeded", words)
        assert f"{size} tokens > {SIZE - 1} maximum" in reply.error()["message"]
    messages = [{"role": "user", "content": "x" * 3 * SIZE}]
    reply = ask(make_hash_llm(max_seq_len=SIZE), CHAT, {**chat_body(messages=messages), **limit})
    check_refused(reply, 400, "messages", "context_length_exceeded", words)


def test_what_must_be_generated_has_to_fit() -> None:
    sent = completion_body(min_tokens=SIZE, max_tokens=32_000)
    reply = ask(make_hash_llm(max_seq_len=SIZE), COMPLETIONS, sent)
    check_refused(reply, 422, "min_tokens", None, "room")
