"""Tool calls and reasoning over HTTP; a stream equals the plain answer in all fields."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from itertools import chain
from typing import Any

import pytest

from infer import Grammar
from infer.engine.client.output import OutputProcessor, collected
from infer.server.openai import schema_base
from infer.server.openai.chat import ChatApi, ChatBody, chat_requests
from infer.server.openai.completions import CompletionsApi
from infer.server.openai.large_json import render
from infer.text.tokenizer import Tokenizer
from infer.text.untrusted.workers import run_steps
from infer.types import FinishReason, StepOutput, TextDelta, TokenLogprobs
from tests.support.cases import slow_but
from tests.support.checkpoints import END_ID, write_tokenizer
from tests.support.doubles import LastingTokenizer, small_tokenizer
from tests.support.hash_engine import small_text_files
from tests.support.serving import (
    BODIES,
    CHAT,
    COMPLETIONS,
    ask,
    asking,
    chat_body,
    scripted,
    spelled,
)

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}<tool_call></tool_call>{% endif %}{% for m in messages %}"
    "<|{{ m.role }}|>{{ m.content }}{% endfor %}<|assistant|>{% if open %}<think>{% endif %}"
    "{# </think> #}"
)
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": CITY}}
NAMED = {"type": "function", "function": {"name": "weather"}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call>'


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = write_tokenizer(tmp_path_factory.mktemp("tools"))
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return LastingTokenizer.from_folder(folder)


def streamed(events: list[Any]) -> tuple[dict[str, Any], str]:
    """The message that the pieces of one choice add up to, and its finish reason."""
    message: dict[str, Any] = {"content": None}
    calls: dict[int, dict[str, Any]] = {}
    reason = None
    for choice in (choice for event in events for choice in event["choices"]):
        assert reason is None
        reason, delta = choice["finish_reason"], choice["delta"]
        for name in ("content", "reasoning_content"):
            if delta.get(name):
                message[name] = (message.get(name) or "") + delta[name]
        for call in delta.get("tool_calls", ()):
            if "id" in call:  # the first piece of a call has its id and its name
                assert call["index"] == len(calls)
                assert call["type"] == "function"
                assert call["function"]["name"]
                calls[call["index"]] = {k: v for k, v in call.items() if k != "index"}
            else:
                assert (call["index"], call.keys()) == (len(calls) - 1, {"index", "function"})
                calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    if calls:
        message["tool_calls"] = list(calls.values())
    assert reason is not None
    return message, reason


@pytest.mark.parametrize(
    ("text", "reasoning", "content", "cities", "reason"),
    [
        ("Hello.", None, "Hello.", [], "stop"),
        (CALL, None, None, ["Ulm"], "tool_calls"),
        (f"<think>Hm</think>\n\nI see.\n{CALL}\n{CALL}", "Hm", "I see.", ["Ulm"] * 2, "tool_calls"),
        (CALL[:-50], None, CALL[:-50], [], "stop"),
    ],
)
def test_calls_and_reasoning(
    tokenizer: Tokenizer,
    text: str,
    reasoning: str | None,
    content: str | None,
    cities: list[str],
    reason: str,
) -> None:
    body = chat_body(tools=[WEATHER], max_tokens=300)
    script = [*spelled(text), END_ID]
    reply = ask(scripted(script, tokenizer=tokenizer), CHAT, body)
    [choice] = reply.json()["choices"]
    message = choice["message"]
    assert (message.get("reasoning_content"), message["content"]) == (reasoning, content)
    calls = message.get("tool_calls", [])
    assert [json.loads(c["function"]["arguments"])["city"] for c in calls] == cities
    assert all(set(c) == {"id", "type", "function"} for c in calls)
    assert len({c["id"] for c in calls}) == len(cities)
    assert choice["finish_reason"] == reason
    stream = ask(scripted(script, tokenizer=tokenizer), CHAT, {**body, "stream": True})
    told, ended = streamed(stream.events())
    for one in (*told.get("tool_calls", ()), *calls):
        del one["id"]  # differs between answers
    assert (told, ended) == (
        {k: v for k, v in message.items() if k not in ("role", "refusal")},
        reason,
    )


def test_a_call_that_is_cut_off_ends_with_length(tokenizer: Tokenizer) -> None:
    body = chat_body(tools=[WEATHER], max_tokens=20)
    [choice] = ask(scripted(spelled(CALL), tokenizer=tokenizer), CHAT, body).json()["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["content"] == CALL[:20]


def test_who_gets_to_see_what(tokenizer: Tokenizer) -> None:
    def said(text: str, **fields: Any) -> dict[str, Any]:
        body = chat_body(max_tokens=300, **fields)
        engine = scripted([*spelled(text), END_ID], tokenizer=tokenizer)
        return dict(ask(engine, CHAT, body).json()["choices"][0]["message"])

    assert said(CALL)["content"] == CALL  # no tools, no calls
    assert said(CALL, tools=[WEATHER], tool_choice="none")["content"] == CALL
    hidden = said("<think>a</think>b", include_reasoning=False)
    assert "reasoning_content" not in hidden
    assert hidden["content"] == "b"
    begun = said("a</think>b", chat_template_kwargs={"open": True})
    assert (begun["reasoning_content"], begun["content"]) == ("a", "b")


def test_a_forced_call_has_a_grammar(tokenizer: Tokenizer) -> None:
    engine = scripted([], tokenizer=tokenizer)
    for choice, parallel, many in (
        ("required", True, True),
        ("required", False, False),
        (NAMED, True, False),
    ):
        fields = {"tools": [WEATHER], "tool_choice": choice, "parallel_tool_calls": parallel}
        wire = schema_base.read(ChatBody, chat_body(**fields, max_tokens=300))
        [request] = run_steps(chat_requests(engine, wire, "a-1"))
        grammar = request.sampling.grammar
        assert isinstance(grammar, Grammar)
        assert ("{0,7}" in grammar.text) is many
        assert "<tool_call>" in grammar.text


STRICT = {"type": "function", "function": {**WEATHER["function"], "strict": True}}  # type: ignore[dict-item]


def test_a_strict_tool_that_the_model_may_choose_has_a_grammar(tokenizer: Tokenizer) -> None:
    engine = scripted([], tokenizer=tokenizer)
    schema = {"type": "json_schema", "json_schema": {"schema": CITY}}
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED]}}
    for fields, kind in (
        ({"tools": [STRICT]}, "calls"),
        ({"tools": [STRICT], "tool_choice": allowed}, "calls"),
        ({"tools": [WEATHER]}, None),
        ({"tools": [STRICT], "tool_choice": "none"}, None),
        ({"tools": [STRICT], "response_format": schema}, "json"),
    ):
        wire = schema_base.read(ChatBody, chat_body(**fields, max_tokens=300))
        [request] = run_steps(chat_requests(engine, wire, "a-1"))
        grammar = request.sampling.grammar
        assert (grammar.kind if grammar else None) == kind, fields
        assert kind != "calls" or "start: opened" in grammar.text  # type: ignore[union-attr]


def test_strict_says_where_it_is_not_enforced(tokenizer: Tokenizer) -> None:
    def reply(how: Tokenizer, *tools: Any) -> Any:
        body = chat_body(tools=list(tools), max_tokens=300)
        size = {"max_seq_len": 100_000, "num_pages": 25_000}
        return ask(scripted([*spelled(CALL), END_ID], tokenizer=how, **size), CHAT, body)

    assert "x-warning" not in reply(tokenizer, STRICT).headers
    bare = Tokenizer(replace(small_text_files(), tool_parser="json"))  # calls without a mark
    assert "strict is not enforced" in reply(bare, STRICT).headers["x-warning"]
    function = {"name": "b", "strict": True, "parameters": {"enum": ["x" * 9999] * 9}}
    large = reply(tokenizer, STRICT, {"type": "function", "function": function})
    assert "strict is not enforced" in large.headers["x-warning"]
    function = {"name": "b", "parameters": {"type": "string", "pattern": "("}, "strict": True}
    wrong = reply(tokenizer, STRICT, {"type": "function", "function": function})
    assert (wrong.status, wrong.error()["param"][:8]) == (400, "tools[1]")


# ---- a stream equals the plain answer, in everything

ATOMS = ["<think>", "</think>\n", CALL, "<tool_call>", "Hi", " ", "\n", "é😀", "{", "stop", "<"]


def outputs(draw: random.Random, request: Any, tokenizer: Tokenizer) -> list[TextDelta]:
    """The deltas of an engine that generates random text, token by token."""
    ids = spelled("".join(draw.choices(ATOMS, k=draw.randint(0, 5))))
    ids += draw.choices(range(262), k=draw.randint(0, 2))  # parts of characters, special tokens
    ids = ids or [65]
    processor, deltas = OutputProcessor(request, tokenizer), []
    end = draw.choice([FinishReason.LENGTH, FinishReason.EOS, FinishReason.COMPLETE])
    for i, token in enumerate(ids):
        logprobs = None
        if request.sampling.logprobs is not None:
            logprobs = TokenLogprobs(-0.5, ((token, -0.5), ((token + 1) % 262, -1.5)))
        reason = end if i == len(ids) - 1 else None
        delta = processor.push(StepOutput(request.request_id, token, reason, logprobs))
        if delta is not None:
            deltas.append(delta)
    return deltas


def merged(draw: random.Random, deltas: list[TextDelta]) -> list[TextDelta]:
    pieces = deltas[:1]
    for delta in deltas[1:]:
        if draw.random() < 0.5:
            pieces[-1] = pieces[-1].merge(delta)
        else:
            pieces.append(delta)
    return pieces


@pytest.mark.parametrize("rounds", [200, pytest.param(1300, marks=pytest.mark.slow)])
def test_a_stream_equals_the_plain_answer_in_everything(tokenizer: Tokenizer, rounds: int) -> None:
    draw = random.Random(3)
    engine = scripted([], tokenizer=tokenizer)
    num_cases = num_calls = num_thoughts = 0
    for _ in range(rounds):
        chat = draw.random() < 0.7
        fields: dict[str, Any] = {"stop": draw.choice([None, "stop", ["op", "{"]])}
        if draw.random() < 0.5:
            fields |= {"logprobs": True, "top_logprobs": 2} if chat else {"logprobs": 2}
        if chat and draw.random() < 0.8:
            fields["tools"] = [WEATHER]
        path = CHAT if chat else COMPLETIONS
        api: Any = ChatApi() if chat else CompletionsApi()
        plain_wire = schema_base.read(api.body, BODIES[path](**fields, n=2))
        requests = run_steps(api.make_requests(engine, plain_wire, "a-1"))
        deltas = [outputs(draw, request, tokenizer) for request in requests]
        whole = list(map(collected, requests, deltas))
        plain = json.loads(render(api.make_answer(engine, plain_wire, requests, "a-1").body(whole)))
        for _ in range(4):
            options = {"stream": True, "stream_options": {"include_usage": True}}
            wire = schema_base.read(api.body, BODIES[path](**fields, n=2, **options))
            answer = api.make_answer(engine, wire, requests, "a-1").events()
            events = list(answer.opening())
            for index, some in enumerate(deltas):
                for piece in merged(draw, some):
                    events += answer.piece(index, piece)
            events += answer.closing()
            chunks = [json.loads(event[6:]) for event in events[:-1]]
            assert chunks[-1]["usage"] == plain["usage"]
            for index, expected in enumerate(plain["choices"]):
                own = [
                    {"choices": [choice]}
                    for chunk in chunks
                    for choice in chunk["choices"]
                    if choice["index"] == index
                ]
                check(chat, own, expected)
                num_cases += 1
                num_calls += len(expected.get("message", {}).get("tool_calls", ()))
                num_thoughts += "reasoning_content" in expected.get("message", {})
    assert num_cases == rounds * 8
    assert num_calls > 0.2 * rounds
    assert num_thoughts > 0.2 * rounds


def check(chat: bool, events: list[Any], expected: dict[str, Any]) -> None:
    choices = [event["choices"][0] for event in events]
    logprobs = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    if chat:
        message, reason = streamed(events)
        whole = {k: v for k, v in expected["message"].items() if k not in ("role", "refusal")}
        assert message == {**whole, "content": whole["content"] or None}
        lists = [one["content"] for one in logprobs]
        assert [*chain(*lists)] == (expected["logprobs"] or {}).get("content", [])
    else:
        assert "".join(choice["text"] for choice in choices) == expected["text"]
        reason = choices[-1]["finish_reason"]
        for name, values in (expected["logprobs"] or {}).items():
            assert [*chain(*(one[name] for one in logprobs))] == values
    assert reason == expected["finish_reason"]


@pytest.mark.parametrize(
    ("options", "said", "reasoning", "thoughts"),
    [
        ({}, "<think>Hm</think>\n\n", "Hm", ("<think>", "</think>")),
        ({}, "", None, ("<think>", "</think>")),
        ({"chat_template_kwargs": {"open": True}}, "Hm\n</think>\n", "Hm", ("", "</think>")),
    ],
)
@pytest.mark.parametrize("way", slow_but(["forced"], ["schema", "forced"]))
def test_a_grammar_begins_behind_the_thoughts(
    tokenizer: Tokenizer,
    options: dict[str, Any],
    said: str,
    reasoning: str | None,
    thoughts: tuple[str, str],
    way: str,
) -> None:
    answer, asked = '{"city": "Ulm"}', {"response_format": {"type": "json_object"}}
    if way == "forced":
        answer, asked = CALL, {"tools": [WEATHER], "tool_choice": "required"}  # type: ignore[dict-item]
    engine = scripted([*spelled(said + answer), END_ID], tokenizer=tokenizer)
    bodies = [chat_body(max_tokens=300, stream=is_, **asked, **options) for is_ in (False, True)]
    for body in bodies:
        [request] = run_steps(chat_requests(engine, schema_base.read(ChatBody, body), "a-1"))
        assert request.thoughts == thoughts
    with asking(engine) as post:
        replies = [post(CHAT, body) for body in bodies]
    for body, reply in zip(bodies, replies, strict=True):
        if body["stream"]:
            message, reason = streamed(reply.events())
        else:
            [choice] = reply.json()["choices"]
            message, reason = choice["message"], choice["finish_reason"]
        assert message.get("reasoning_content") == reasoning
        if way == "forced":
            assert reason == "tool_calls"
            [call] = message["tool_calls"]
            assert json.loads(call["function"]["arguments"]) == {"city": "Ulm"}
        else:
            assert json.loads(message["content"]) == {"city": "Ulm"}


def test_where_no_thoughts_can_be_the_grammar_begins_at_once(tokenizer: Tokenizer) -> None:
    def thoughts(tokenizer: Tokenizer, **fields: Any) -> Any:
        wire = schema_base.read(ChatBody, chat_body(**fields))
        steps = chat_requests(scripted([], tokenizer=tokenizer), wire, "a-1")
        [request] = run_steps(steps)
        return request.thoughts

    form = {"response_format": {"type": "json_object"}}
    assert thoughts(tokenizer) is None  # nothing is restricted
    closed = [{"role": "user", "content": "<think></think>"}]
    assert thoughts(tokenizer, **form) is not None
    ends = {"add_generation_prompt": False, "continue_final_message": True}
    closed.append({"role": "assistant", "content": "<think>\n\n</think>\n\n"})
    assert thoughts(tokenizer, **form, **ends, messages=closed) is None
    assert thoughts(small_tokenizer(), **form) is None  # its template has none


@pytest.mark.parametrize("choice", slow_but(["auto", "required"], ["auto", "required", NAMED]))
def test_arguments_are_streamed_as_they_are_written(tokenizer: Tokenizer, choice: Any) -> None:
    """600 characters come in at least 20 pieces, which add up to the whole answer's arguments."""
    text = CALL.replace("Ulm", "Ulm, " * 120)
    body = chat_body(tools=[WEATHER], tool_choice=choice, max_tokens=900)
    script = [*spelled(text), END_ID]
    how: dict[str, Any] = {"tokenizer": tokenizer, "max_seq_len": 4096, "num_pages": 4096}
    [whole] = ask(scripted(script, **how), CHAT, body).json()["choices"]
    events = ask(scripted(script, step_s=0.0005, **how), CHAT, {**body, "stream": True}).events()
    message, reason = streamed(events)
    [call] = message["tool_calls"]
    assert call["function"] == whole["message"]["tool_calls"][0]["function"]
    assert json.loads(call["function"]["arguments"]) == {"city": "Ulm, " * 120}
    assert reason == whole["finish_reason"] == "tool_calls"
    deltas = [choice["delta"] for event in events for choice in event["choices"]]
    assert sum("tool_calls" in delta for delta in deltas) >= 20
    assert not any(delta.get("content") for delta in deltas)


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_whose_arguments_are_cut_is_a_call(tokenizer: Tokenizer, stream: bool) -> None:
    begin = CALL.index('{"city') + 2
    bodies = {
        size: chat_body(tools=[WEATHER], max_tokens=size, stream=stream)
        for size in range(begin, CALL.index("}") + 1)
    }
    with asking(scripted(spelled(CALL), tokenizer=tokenizer)) as post:
        replies = {size: post(CHAT, body) for size, body in bodies.items()}
    for size, reply in replies.items():
        if stream:
            message, reason = streamed(reply.events())
        else:
            [choice] = reply.json()["choices"]
            message, reason = choice["message"], choice["finish_reason"]
        [call] = message["tool_calls"]
        assert call["function"] == {"name": "weather", "arguments": CALL[begin - 2 : size]}
        assert (reason, message["content"]) == ("length", None)
