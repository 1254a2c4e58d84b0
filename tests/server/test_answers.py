"""Plain answers: their exact shapes, choices, seeds, usage, finish reasons, ids, routes."""

from __future__ import annotations

import asyncio
import re
import time
from datetime import datetime
from typing import Any

import pytest

from infer.server.openai import grammar_fields
from infer.server.openai.chat import ChatBody
from infer.server.openai.completions import CompletionBody
from infer.types.grammar import Grammar
from tests.support.doubles import make_hash_llm, small_tokenizer
from tests.support.serving import (
    BODIES,
    CHAT,
    COMPLETIONS,
    App,
    Reply,
    ask,
    asking,
    chat_body,
    completion_body,
    scripted,
    spelled,
    with_app,
)

BEGAN_S = int(time.time())

USAGE_OF_8 = {
    "prompt_tokens": 6,  # one is the begin-of-sequence token
    "completion_tokens": 8,
    "total_tokens": 14,
    "prompt_tokens_details": {"cached_tokens": 0},
    "completion_tokens_details": {"reasoning_tokens": 0},
}
EOS = 257


def text_of(path: str, choice: dict[str, Any]) -> Any:
    return choice["text"] if path == COMPLETIONS else choice["message"]["content"]


def test_a_completion() -> None:
    body = ask(scripted(spelled("Hi there, you")), COMPLETIONS, completion_body()).json()
    assert re.fullmatch(r"cmpl-[0-9a-f]{32}", body.pop("id"))
    assert BEGAN_S <= body.pop("created") <= time.time()
    assert body == {
        "object": "text_completion",
        "model": "hash-model",
        "choices": [{"index": 0, "text": "Hi there", "logprobs": None, "finish_reason": "length"}],
        "usage": USAGE_OF_8,
    }


def test_a_chat_completion() -> None:
    body = ask(scripted(spelled("Hi there, you")), CHAT, chat_body()).json()
    assert re.fullmatch(r"chatcmpl-[0-9a-f]{32}", body.pop("id"))
    assert BEGAN_S <= body.pop("created") <= time.time()
    num_prompt = len(
        small_tokenizer().apply_chat_template(
            [{"role": "user", "content": "Hello"}], add_generation_prompt=True
        )[1]
    )
    assert body == {
        "object": "chat.completion",
        "model": "hash-model",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hi there", "refusal": None},
                "logprobs": None,
                "finish_reason": "length",
            }
        ],
        "usage": {**USAGE_OF_8, "prompt_tokens": num_prompt, "total_tokens": num_prompt + 8},
    }


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("changes", "script", "reason", "text", "num_tokens"),
    [
        ({}, "long enough", "length", "long eno", 8),
        ({"stop": "g"}, "long enough", "stop", "lon", 4),
        ({"stop": ["xx", "g e"]}, "long enough", "stop", "lon", 6),
        ({"stop": "g", "include_stop_str_in_output": True}, "long enough", "stop", "long", 4),
        ({"stop": "g", "min_tokens": 5}, "long enough", "length", "long eno", 8),
        ({"stop_token_ids": spelled("g")}, "long enough", "stop", "lon", 4),
        ({"stop": []}, "long enough", "length", "long eno", 8),
    ],
)
def test_how_it_ends(
    path: str, changes: dict[str, Any], script: str, reason: str, text: str, num_tokens: int
) -> None:
    body = ask(scripted(spelled(script)), path, BODIES[path](**changes)).json()
    assert text_of(path, body["choices"][0]) == text
    assert body["choices"][0]["finish_reason"] == reason
    assert body["usage"]["completion_tokens"] == num_tokens


@pytest.mark.parametrize("path", BODIES)
def test_the_end_of_the_text(path: str) -> None:
    engine = scripted([*spelled("ab"), EOS, *spelled("cd")])
    choice = ask(engine, path, BODIES[path]()).json()["choices"][0]
    assert (text_of(path, choice), choice["finish_reason"]) == ("ab", "stop")
    engine = scripted([*spelled("ab"), EOS, *spelled("cd")])
    choice = ask(engine, path, BODIES[path](ignore_eos=True, max_tokens=5)).json()["choices"][0]
    assert (text_of(path, choice), choice["finish_reason"]) == ("abcd", "length")
    engine = scripted([*spelled("ab"), EOS, *spelled("cd")])
    changes = {"ignore_eos": True, "max_tokens": 5, "skip_special_tokens": False}
    choice = ask(engine, path, BODIES[path](**changes)).json()["choices"][0]
    assert text_of(path, choice) == "ab<|end_of_text|>cd"


def test_the_default_number_of_tokens() -> None:
    body = completion_body(ignore_eos=True)
    del body["max_tokens"]
    assert ask(scripted([1]), COMPLETIONS, body).json()["usage"]["completion_tokens"] == 16
    body = chat_body(ignore_eos=True)
    del body["max_tokens"]
    usage = ask(scripted([1], max_seq_len=64), CHAT, body).json()["usage"]
    assert usage["total_tokens"] == 64
    body["max_completion_tokens"] = 3
    assert ask(scripted([1]), CHAT, body).json()["usage"]["completion_tokens"] == 3
    body["max_tokens"] = 3
    assert ask(scripted([1]), CHAT, body).json()["usage"]["completion_tokens"] == 3


def texts(reply: Reply) -> list[str]:
    choices = reply.json()["choices"]
    assert [choice["index"] for choice in choices] == list(range(len(choices)))
    return [choice["text"] for choice in choices]


def test_all_spellings_of_a_prompt() -> None:
    async def use(app: App) -> None:
        async def texts_of(prompt: Any, **changes: Any) -> list[str]:
            return texts(await app.post(COMPLETIONS, completion_body(prompt=prompt, **changes)))

        ids = [small_tokenizer().encode(word) for word in ("one", "two")]
        [one] = await texts_of("one")
        [two] = await texts_of("two")
        assert one != two
        assert await texts_of(["one", "two"]) == [one, two]
        assert await texts_of(["two"]) == [two]
        assert await texts_of(ids[0]) == [one]
        assert await texts_of(ids) == [one, two]
        # three choices of each prompt, numbered prompt by prompt
        [_, one_2, one_3] = await texts_of("one", n=3)
        assert await texts_of("one", seed=2) == [one_2]
        assert await texts_of("one", seed=3) == [one_3]
        both = await texts_of(["one", "two"], n=3)
        assert both[:3] == [one, one_2, one_3]
        assert both[3:] == await texts_of("two", n=3)
        # the largest seed has a successor too
        assert len(await texts_of("one", n=2, seed=2**63 - 1)) == 2
        assert (await texts_of("one", n=2, seed=2**63 - 1))[1] == (await texts_of("one", seed=0))[0]

    with_app(make_hash_llm(vocab_size=262), use)


@pytest.mark.parametrize("path", BODIES)
def test_choices_without_a_seed_differ(path: str) -> None:
    body = BODIES[path](n=4)
    del body["seed"]
    choices = ask(make_hash_llm(), path, body).json()["choices"]
    assert len({text_of(path, choice) for choice in choices}) == 4


def test_usage_of_several_choices() -> None:
    async def use(app: App) -> None:
        body = completion_body(prompt=["a" * 20, "b" * 10], n=2, max_tokens=5, ignore_eos=True)
        usage = (await app.post(COMPLETIONS, body)).json()["usage"]
        assert usage["prompt_tokens"] == 21 + 11  # each prompt once
        assert usage["completion_tokens"] == 4 * 5
        assert usage["total_tokens"] == 52
        assert usage["prompt_tokens_details"] == {"cached_tokens": 0}
        usage = (await app.post(COMPLETIONS, body)).json()["usage"]
        assert usage["prompt_tokens_details"] == {"cached_tokens": 20 + 8}  # whole pages of four

    with_app(make_hash_llm(max_num_batched_tokens=8), use)


def test_messages_become_a_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts are joined, "developer" becomes "system", roles and names reach the template."""
    engine = make_hash_llm()
    seen: list[Any] = []
    real = engine.render_chat

    def render(messages: Any, **arguments: Any) -> Any:
        seen.append((messages, arguments))
        return real([m for m in messages if m["role"] != "tool"], **arguments)

    monkeypatch.setattr(engine, "render_chat", render)
    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]
    messages = [
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": parts, "name": "Ann"},
        {"role": "assistant", "content": "", "refusal": None, "tool_calls": []},
        {"role": "assistant", "content": "c", "provider_specific_fields": {"refusal": None}},
        {"role": "tool", "content": "x", "tool_call_id": "7"},
        {"role": "user", "content": []},
    ]
    assert ask(engine, CHAT, chat_body(messages=messages)).status == 200
    assert seen == [
        (
            [
                {"role": "system", "content": "Be kind."},
                {"role": "user", "content": "a b", "name": "Ann"},
                {"role": "assistant", "content": ""},
                {"role": "assistant", "content": "c"},
                {"role": "tool", "content": "x", "tool_call_id": "7"},
                {"role": "user", "content": ""},
            ],
            {"add_generation_prompt": True},
        )
    ]


def test_a_template_that_refuses_is_the_callers_fault() -> None:
    messages = [{"role": "user", "name": "nobody", "content": "x"}]
    reply = ask(make_hash_llm(), CHAT, chat_body(messages=messages))
    assert reply.status == 400
    assert reply.error()["param"] == "messages"


OTHERWISE = {
    *("model", "prompt", "messages", "n", "stream", "stream_options", "stream_format"),
    *("add_generation_prompt", "continue_final_message", "chat_template_kwargs", "truncation"),
    *("user", "metadata", *grammar_fields.FIELDS, "session_id"),
    *("tools", "tool_choice", "parallel_tool_calls", "include_reasoning"),
    *("echo", "return_token_ids", "timeout", "reasoning_effort", "enable_thinking", "thinking"),
    *("max_completion_tokens", "logprobs", "top_logprobs", "priority", "logit_bias"),
    *("reuse_prefix", "prediction", "thinking_token_budget"),
}
"""Fields that do not go to the engine under their own names."""


def test_every_field_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    """No accepted option is dropped on the way to the engine."""
    sampling = {
        "temperature": 0.5,
        "top_p": 0.6,
        "top_k": 7,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "seed": 9,
        "max_tokens": 6,
        "min_tokens": 2,
        "ignore_eos": True,
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "prompt_logprobs": 1,
        "speculation": False,
    }
    lists = {
        "stop": ["x", "y"],
        "stop_token_ids": [3, 4],
        "allowed_token_ids": [*range(60)],
        "bad_words": ["z"],
    }
    engine = make_hash_llm()
    real, made = engine.make_request, list[Any]()

    def make(*args: Any, **kwargs: Any) -> Any:
        made.append(real(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr(engine, "make_request", make)
    with asking(engine) as post:
        for path, extra, logprobs in (
            (COMPLETIONS, {"logprobs": 3}, 3),
            (CHAT, {"logprobs": True, "top_logprobs": 3, "thinking_token_budget": 7}, 3),
            (CHAT, {"logprobs": True}, 0),
            (CHAT, {}, None),
            (COMPLETIONS, {"logprobs": 0}, 0),
        ):
            body = BODIES[path](**sampling, **lists, **extra, priority=-5, logit_bias={"65": 1.5})
            body["guided_choice"] = ["a", "b"]
            body["prediction"] = {"type": "content", "content": "likely"}
            assert post(path, body).status == 200
            request = made.pop()
            assert not made
            assert request.priority == -5
            assert {name: getattr(request.sampling, name) for name in sampling} == sampling
            assert {name: list(getattr(request.sampling, name)) for name in lists} == lists
            assert request.sampling.logit_bias == ((65, 1.5),)
            assert request.sampling.prediction == "likely"
            assert request.prediction_token_ids == tuple(spelled("likely"))
            assert request.sampling.grammar == Grammar.choice(["a", "b"])
            assert request.sampling.logprobs == logprobs
            budget = extra.get("thinking_token_budget")
            assert request.sampling.thinking_token_budget == budget
            model = CompletionBody if path == COMPLETIONS else ChatBody
            assert set(model.model_fields) <= {*sampling, *lists, *OTHERWISE}


def test_a_long_prompt_is_taken_in_beside_the_event_loop() -> None:
    engine = make_hash_llm(max_seq_len=60_000, num_pages=20_000, max_num_batched_tokens=60_000)
    body = ask(engine, COMPLETIONS, completion_body(prompt="x" * 40_000)).json()
    assert body["usage"]["prompt_tokens"] == 40_001


MODEL = {
    "id": "hash-model",
    "object": "model",
    "owned_by": "infer",
    "type": "model",
    "display_name": "hash-model",
    "lifecycle": "active",
    "max_input_tokens": 512,
    "max_tokens": 512,
    "max_model_len": 512,
    "sampling_defaults": {"source": None},
}


def test_the_other_routes() -> None:
    async def use(app: App) -> None:
        listed = (await app.get("/v1/models")).json()
        one = (await app.get("/v1/models/hash-model")).json()
        ends = {"has_more": False, "first_id": "hash-model", "last_id": "hash-model"}
        assert listed == {"object": "list", "data": [one], **ends}
        created_s = one.pop("created")
        assert BEGAN_S <= created_s <= time.time()
        made = datetime.fromisoformat(one.pop("created_at"))
        assert made.timestamp() == created_s
        assert one == MODEL
        health = await app.get("/health")
        assert (health.status, health.json()) == (200, {"status": "ok"})
        index = await app.get("/")
        assert index.status == 200
        assert index.headers["content-type"].startswith("text/plain")
        assert "hash-model" in index.body.decode()

    with_app(make_hash_llm(), use)


def test_the_name_of_a_model_may_have_slashes() -> None:
    engine = make_hash_llm()
    engine.model_name = "people/hash-model"
    path = "/v1/models/people/hash-model"
    assert with_app(engine, lambda app: app.get(path)).json()["id"] == engine.model_name


@pytest.mark.parametrize(
    ("offered", "echoed"),
    [
        ("req-1_a.B", True),
        ("x" * 128, True),
        ("x" * 129, False),
        ("a b", False),
        ("a/b", False),
        ("", False),
        ("é", False),
        ("a\x0b", False),
    ],
)
def test_request_ids(offered: str, echoed: bool) -> None:
    async def use(app: App) -> None:
        for reply in (
            await app.get("/health", **{"x-request-id": offered}),
            await app.post(COMPLETIONS, completion_body(), headers={"x-request-id": offered}),
            await app.post(CHAT, chat_body(stream=True), headers={"x-request-id": offered}),
            await app.post(CHAT, {}, headers={"x-request-id": offered}),
            await app.get("/nothing", **{"x-request-id": offered}),
        ):
            given = reply.headers["x-request-id"]
            assert reply.headers["request-id"] == given  # where Anthropic's clients look
            assert (given == offered) == echoed
            assert echoed or re.fullmatch("[0-9a-f]{32}", given)

    with_app(make_hash_llm(), use)


def test_the_same_request_id_twice_at_once_is_no_key() -> None:
    async def use(app: App) -> None:
        body, headers = completion_body(max_tokens=30, ignore_eos=True), {"x-request-id": "same"}
        replies = await asyncio.gather(
            *(app.post(COMPLETIONS, body, headers=headers) for _ in range(3))
        )
        assert [reply.status for reply in replies] == [200] * 3
        assert len({reply.json()["id"] for reply in replies}) == 3

    with_app(make_hash_llm(step_s=0.001), use)
