"""`truncation: "auto"`: a chat that is too long is answered without its oldest turns, and says
so."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from infer.engine.client.async_llm import AsyncLLM
from infer.errors import RequestError
from infer.server.openai.chat import ChatBody
from infer.server.openai.schema_base import read
from infer.server.openai.truncation import Dropped, Fitted, droppable, fitted
from infer.text.tokenizer import Tokenizer
from infer.text.untrusted.workers import Steps, run_steps
from tests.support.doubles import LastingTokenizer, make_hash_llm
from tests.support.hash_engine import small_text_files
from tests.support.serving import CHAT, COMPLETIONS, App, ask, chat_body, check_refused, with_app

SIZE = 512
"""Tokens of the context; a character of these chats is a token."""
SYSTEM = {"role": "system", "content": "Be kind."}
STRICT = (  # roles must alternate, and calls and results are shown
    "{% set ns = namespace(user=true) %}{% for m in messages if m.role != 'system' %}"
    "{% if (m.role == 'user') != ns.user %}{{ raise_exception('alternate!') }}{% endif %}"
    "{% set ns.user = m.role == 'assistant' and not m.tool_calls %}{% endfor %}"
    "{% for m in messages %}"
    "<{{ m.role }}>{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


@cache
def tokenizer_of(source: str) -> Tokenizer:
    return LastingTokenizer(replace(small_text_files(), templates={"default": source}))


def engine(source: str | None = None, **settings: Any) -> AsyncLLM:
    tokenizer = None if source is None else tokenizer_of(source)
    return make_hash_llm(tokenizer=tokenizer, max_seq_len=SIZE, **settings)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def answer(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def calling(*names: str) -> dict[str, Any]:
    calls = [
        {"id": name, "type": "function", "function": {"name": "f", "arguments": "{}"}}
        for name in names
    ]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def result(name: str, text: str = "done") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": name, "content": text}


def long_chat(num_turns: int, size: int = 20) -> list[dict[str, Any]]:
    """A chat of so many questions and answers, numbered, and a last question."""
    turns = [
        [user(f"q{i:03}" + "x" * size), answer(f"a{i:03}" + "y" * size)] for i in range(num_turns)
    ]
    return [SYSTEM, *itertools.chain.from_iterable(turns), user("The last one?")]


# ---- which turns


CASES: dict[str, tuple[list[dict[str, Any]], list[list[int]]]] = {
    "nothing": ([], []),
    "rules only": ([SYSTEM, SYSTEM], []),
    "a question": ([SYSTEM, user("a")], []),
    "questions and answers": (
        [SYSTEM, user("a"), answer("b"), user("c"), answer("d"), user("e")],
        [[1, 2], [3, 4]],
    ),
    "rules in between stay": (
        [SYSTEM, user("a"), SYSTEM, answer("b"), SYSTEM, user("c"), SYSTEM],
        [[1, 3]],
    ),
    "a greeting": ([answer("hi"), user("a"), answer("b"), user("c")], [[0], [1, 2]]),
    "questions in a row": ([user("a"), user("b"), answer("c"), user("d")], [[0], [1, 2]]),
    "an answer that goes on": ([user("a"), answer("b"), user("c"), answer("d")], [[0, 1]]),
    "calls before the last question": (
        [user("a"), calling("1", "2"), result("2"), result("1"), answer("b"), user("c")],
        [[0, 1, 2, 3, 4]],
    ),
    "a loop of calls after it": (
        [SYSTEM, user("a"), calling("1"), result("1"), calling("2"), result("2"), calling("3"),
         result("3")],
        [[2, 3], [4, 5]],
    ),
    "a result after the next question": (
        [user("a"), answer("b"), user("c"), calling("1"), user("d"), result("1"), user("e")],
        [[0, 1], [2, 3, 4, 5]],
    ),
    "a result after the last question": (
        [user("a"), answer("b"), user("c"), calling("1"), user("d"), result("1")],
        [[0, 1], [2]],
    ),
    "ids that come again": (
        [user("a"), calling("1"), result("1"), user("b"), calling("1"), result("1"), user("c")],
        [[0, 1, 2], [3, 4, 5]],
    ),
    "results that nobody has asked for": (
        [result("1"), user("a"), answer("b"), result("7"), user("c")],
        [[0], [1, 2, 3]],
    ),
    "no question at all": ([SYSTEM, answer("a"), answer("b"), answer("c")], [[1], [2]]),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_turns_that_may_go(name: str) -> None:
    messages, turns = CASES[name]
    assert droppable(messages) == turns


def test_a_turn_of_any_chat_is_whole() -> None:
    """Of many random chats: what must stay stays, and calls and results go together."""
    draw = random.Random(1)
    for _ in range(2000):
        messages: list[dict[str, Any]] = []
        made: list[str] = []
        for _ in range(draw.randrange(1, 14)):
            role = draw.choice(["system", "user", "assistant", "call", "tool"])
            if role == "call":
                made += (names := [f"{len(made)}", f"{len(made)}b"][: draw.randrange(1, 3)])
                messages.append(calling(*names))
            elif role == "tool" and made:
                messages.append(result(draw.choice(made)))
            elif role != "tool":
                messages.append({"role": role, "content": "x"})
        turns = droppable(messages)
        gone: set[int] = set()
        for turn in turns:
            assert turn
            assert gone.isdisjoint(turn)
            gone |= set(turn)
            left = [m for i, m in enumerate(messages) if i not in gone]
            asked = {c["id"] for m in messages for c in m.get("tool_calls", ())}
            kept = {c["id"] for m in left for c in m.get("tool_calls", ())}
            told = {m["tool_call_id"] for m in left if m["role"] == "tool"}
            lost = {messages[i]["tool_call_id"] for i in gone if messages[i]["role"] == "tool"}
            assert told & asked <= kept
            assert not lost & kept
            assert [m for m in messages if m["role"] == "system"] == [
                m for m in left if m["role"] == "system"
            ]
            assert messages[-1] in left
            questions = [m for m in messages if m["role"] == "user"]
            assert not questions or any(m is questions[-1] for m in left)


# ---- the search


def fit(
    messages: list[dict[str, Any]], render: Callable[[list[dict[str, Any]]], str], room: int
) -> Fitted[str]:
    """The result of `fitted` for a template that is rendered in place."""

    def steps(some: list[dict[str, Any]]) -> Steps[str]:
        yield from ()
        return render(some)

    return run_steps(fitted(messages, steps, len, room))


@pytest.mark.parametrize("num_turns", [1, 2, 3, 7, 8, 9, 100, 511])
def test_the_fewest_turns_go_and_few_are_rendered(num_turns: int) -> None:
    messages = long_chat(num_turns)
    seen: list[int] = []

    def render(some: list[dict[str, Any]]) -> str:
        seen.append(len(some))
        return "".join(m["content"] for m in some)

    whole = len(render(messages))
    least = len(SYSTEM["content"] + "The last one?")
    for room in (*range(least, whole, max(1, whole // 37)), whole, whole + 1):
        seen.clear()
        found = fit(messages, render, room)
        turns, rest = divmod(found.dropped.num_messages, 2)
        assert not rest
        assert len(found.prompt) == found.num_tokens <= room
        assert found.num_tokens + found.dropped.num_tokens == whole
        assert turns == 0 or found.num_tokens + 48 > room  # one turn more would not have fitted
        assert len(seen) <= 2 + num_turns.bit_length()
    for room in (least - 1, 1):
        assert fit(messages, render, room).dropped.num_messages == 2 * num_turns
    for room in (0, -5):
        seen.clear()
        assert fit(messages, render, room).dropped == Dropped()
        assert len(seen) == 1


def test_what_a_template_refuses_of_a_shorter_chat_does_not_fit() -> None:
    messages = long_chat(9)

    def render(some: list[dict[str, Any]]) -> str:
        if len(some) in (4, 6, 8, 10, 12):
            raise RequestError("no")
        return "".join(m["content"] for m in some)

    whole = len(render(messages))
    assert fit(messages, render, whole - 1).num_tokens < whole

    def picky(some: list[dict[str, Any]]) -> str:
        if len(some) < len(messages):
            raise RequestError("no")
        return render(some)

    assert fit(messages, picky, 100).dropped == Dropped()
    with pytest.raises(RequestError, match="no"):
        fit(messages[:10], picky, 100)


# ---- over HTTP


@pytest.mark.parametrize("max_tokens", [None, 1, 8, 100])
def test_an_answer_says_what_was_left_out(max_tokens: int | None) -> None:
    messages = long_chat(20)

    async def use(app: App) -> None:
        body = chat_body(messages=messages, max_tokens=max_tokens, ignore_eos=True)
        for plain in (body, {**body, "truncation": "disabled"}):
            refused = await app.post(CHAT, plain)
            check_refused(refused, 400, "messages", "context_length_exceeded", "512")
        whole = (await app.post(f"{CHAT}/render", body)).json()
        assert "truncated_messages" not in whole

        body["truncation"] = "auto"
        shown = await app.post(f"{CHAT}/render", body)
        prompt = shown.json()
        num_messages = prompt["truncated_messages"]
        assert shown.headers["x-truncated-messages"] == str(num_messages)
        assert 0 < num_messages < 40
        assert prompt["count"] + prompt["truncated_tokens"] == whole["count"]
        assert prompt["count"] + (max_tokens or 1) <= SIZE
        # The prompt is that of the shorter chat, and one turn more would not fit.
        rest = [SYSTEM, *messages[1 + num_messages :]]
        by_hand = (await app.post(f"{CHAT}/render", chat_body(messages=rest))).json()
        assert prompt["prompt"] == by_hand["prompt"]
        longer = [SYSTEM, *messages[num_messages - 1 :]]
        more = (await app.post(f"{CHAT}/render", chat_body(messages=longer))).json()
        assert more["count"] + (max_tokens or 1) > SIZE

        reply = await app.post(CHAT, body)
        usage = reply.json()["usage"]
        assert reply.headers["x-truncated-messages"] == str(num_messages)
        told = {name: usage[name] for name in ("truncated_messages", "truncated_tokens")}
        assert told == {name: prompt[name] for name in told}
        assert usage["prompt_tokens"] == prompt["count"]
        assert usage["completion_tokens"] == (max_tokens or SIZE - prompt["count"])

        stream = {**body, "stream": True}
        reply = await app.post(CHAT, {**stream, "stream_options": {"include_usage": True}})
        assert reply.headers["x-truncated-messages"] == str(num_messages)
        assert told.items() <= reply.events()[-1]["usage"].items()
        reply = await app.post(CHAT, stream)
        assert reply.headers["x-truncated-messages"] == str(num_messages)
        reply = await app.post(CHAT, {**stream, "stream_format": "events"})
        done = json.loads(reply.body.decode().strip().split("\n")[-1].removeprefix("data: "))
        assert told.items() <= done["usage"].items()

    with_app(engine(), use)


@pytest.mark.parametrize("max_tokens", [SIZE // 2, SIZE, 10**6])
def test_a_large_limit_takes_no_more_than_half_of_the_context(max_tokens: int) -> None:
    body = chat_body(messages=long_chat(20), truncation="auto", max_tokens=max_tokens)
    reply = ask(engine(), CHAT, {**body, "ignore_eos": True})
    usage = reply.json()["usage"]
    assert SIZE // 4 < usage["prompt_tokens"] <= SIZE // 2
    assert usage["completion_tokens"] == min(max_tokens, SIZE - usage["prompt_tokens"])


def test_a_chat_that_fits_is_answered_as_ever() -> None:
    async def use(app: App) -> None:
        for messages in ([user("Hello")], long_chat(4)):
            replies = [
                await app.post(CHAT, chat_body(messages=messages, reuse_prefix=False, **more))
                for more in ({}, {"truncation": "auto"})
            ]
            assert all("x-truncated-messages" not in reply.headers for reply in replies)
            plain, automatic = (reply.json() for reply in replies)
            for name in ("choices", "usage"):
                assert plain[name] == automatic[name]

    with_app(engine(), use)


@pytest.mark.parametrize(
    ("messages", "more", "words"),
    [
        ([user("x" * 600)], {}, "tokens > 511 maximum"),
        ([*long_chat(3), user("x" * 600)], {}, "7 messages were left out"),
        ([{"role": "system", "content": "x" * 600}, *long_chat(3)], {}, "6 messages were left out"),
    ],
)  # fmt: skip
def test_what_must_stay_may_be_too_long(messages: Any, more: Any, words: str) -> None:
    reply = ask(engine(), CHAT, chat_body(messages=messages, truncation="auto", **more))
    assert reply.status == 400
    error = reply.error()
    assert error["code"] == "context_length_exceeded"
    assert words in error["message"]


def test_a_session_keeps_what_its_prompts_leave_out(tmp_path: Path) -> None:
    async def use(app: App) -> None:
        messages = long_chat(20)
        session = (await app.post("/v1/sessions", {"messages": messages[:-1]})).json()["id"]
        body = chat_body(messages=messages[-1:], session_id=session)
        refused = await app.post(CHAT, body)
        check_refused(refused, 400, "messages", "context_length_exceeded", "512")
        body["truncation"] = "auto"
        shown = (await app.post(f"{CHAT}/render", body)).json()
        for turn in range(2):
            reply = await app.post(CHAT, body)
            assert reply.status == 200
            left_out = int(reply.headers["x-truncated-messages"])
            assert left_out == reply.json()["usage"]["truncated_messages"]
            if turn == 0:
                assert left_out == shown["truncated_messages"]
            kept = (await app.get(f"/v1/sessions/{session}")).json()["messages"]
            assert kept[: len(messages)] == messages
            assert len(kept) == len(messages) + 1 + 2 * turn

    with_app(engine(), use, sessions=f"sqlite:///{tmp_path}/s.db")


def test_a_template_that_wants_roles_to_alternate_gets_whole_turns() -> None:
    """Also in the middle of a loop of calls."""
    turns = [user("a" * 90), answer("b" * 90), user("c" * 90), answer("d" * 90), user("e" * 90)]
    loop = [each for i in range(8) for each in (calling(str(i)), result(str(i), "f" * 30))]

    async def use(app: App) -> None:
        for count in range(len(loop) // 2 + 1):
            messages = [SYSTEM, *turns, *loop[: 2 * count]]
            body = chat_body(messages=messages, truncation="auto")
            reply = await app.post(CHAT, body)
            assert reply.status == 200, reply.body
            prompt = (await app.post(f"{CHAT}/render", body)).json()["prompt"]
            assert prompt.startswith("<system>Be kind.<user>")
            assert "e" * 90 in prompt
            assert prompt.count("<tool_call>") == prompt.count("f" * 30) <= count
            if count:
                assert prompt.endswith("f" * 30 + "<assistant>")

    with_app(engine(STRICT), use)


def test_the_last_message_is_continued_all_the_same() -> None:
    messages = [*long_chat(20), answer("It begins")]
    body = chat_body(messages=messages, truncation="auto", continue_final_message=True)
    prompt = ask(engine(), f"{CHAT}/render", body).json()
    assert prompt["truncated_messages"] > 0
    assert prompt["prompt"].endswith("It begins")


def test_long_chats_are_truncated_beside_the_event_loop() -> None:
    """So that a short body with many turns is rendered several times in a thread."""
    for num_turns, is_heavy in ((1, False), (40, True)):
        body = {"messages": long_chat(num_turns), "truncation": "auto"}
        assert read(ChatBody, body).is_heavy is is_heavy
        assert not read(ChatBody, {**body, "truncation": "disabled"}).is_heavy


def test_other_values_and_other_endpoints() -> None:
    async def use(app: App) -> None:
        wrong = await app.post(CHAT, chat_body(truncation="middle"))
        check_refused(wrong, 422, "truncation", None, "'auto'")
        completion = {"model": "hash-model", "prompt": "Hello", "max_tokens": 4}
        assert (await app.post(COMPLETIONS, {**completion, "truncation": "disabled"})).status == 200
        wrong = await app.post(COMPLETIONS, {**completion, "truncation": "auto"})
        check_refused(wrong, 400, "truncation", "unsupported_parameter", '"disabled"')

    with_app(engine(), use)
