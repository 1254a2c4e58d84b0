"""Whatever a chat has answered is taken back: whole, cut at every character, in every format."""

from __future__ import annotations

import json
from typing import Any

import pytest

from infer.server.openai import schema_base
from infer.server.openai.chat import ChatBody, plain_messages
from infer.text.answer_parser import forced_format, parser_for
from infer.text.chat_template import ChatTemplate
from infer.text.tools.call import ToolCall
from infer.text.tools.formats import FORMATS, ToolFormat, thoughts_in
from infer.text.tools.tool_use import find_tool_use
from tests.server.test_tool_loops import NO_TOOLS, WEATHER, saying, tokenizer_of
from tests.support.cases import one_of
from tests.support.ready_templates import template_of
from tests.support.serving import CHAT, App, ask, chat_body, spelled, with_app
from tests.support.tool_answers import told_apart
from tests.support.tool_conversations import OWN

REFUSES_EMPTY = (  # Mistral's: an answer has text or calls
    "{% for m in messages %}{% if m.role == 'assistant' and not m.content and not m.tool_calls %}"
    "{{ raise_exception('empty!') }}{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}"
)
REFUSES_BLANK = REFUSES_EMPTY.replace("not m.content ", "not m.content | trim ")
SHOWS_TEXT = OWN["qwen3"][0].replace(
    "c.function.arguments | tojson",
    "c.function.arguments if c.function.arguments is string else c.function.arguments | tojson",
)
TEMPLATES = {name: source for name, (source, _) in OWN.items()} | {
    "refuses empty": REFUSES_EMPTY,
    "refuses blank": REFUSES_BLANK,
    "shows text": SHOWS_TEXT,
}
LONG = ToolCall("weather", json.dumps({"city": 'Ulm "é" \\', "days": [1, {"a": None}, -2.5e3]}))
DROP_TEXT = ("nine", "python", "llama32")
"""Templates that leave out the text of an answer with calls, as their models are trained."""
ASKED = {"role": "user", "content": "Weather?"}


def sent_back(message: dict[str, Any], *more: dict[str, Any]) -> list[dict[str, Any]]:
    """The messages for the template, as the server makes them of what a client sends."""
    sent = json.loads(json.dumps([ASKED, message, *more]))
    wire = schema_base.read(ChatBody, {"messages": sent, "tools": [WEATHER]})
    return plain_messages(wire)


def message_of(text: str, way: ToolFormat, **how: Any) -> dict[str, Any]:
    """The message that the server makes of an answer's text."""
    reasoning, content, calls, *_ = told_apart([text], way, names=["weather"], **how)
    message: dict[str, Any] = {"role": "assistant", "content": content or None, "refusal": None}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        functions = [{"name": call.name, "arguments": call.arguments} for call in calls]
        message["tool_calls"] = [
            {"id": f"call_0123456789abcdef_0_{i}", "type": "function", "function": each}
            for i, each in enumerate(functions)
        ]
    return message


def check(
    found: ChatTemplate, message: dict[str, Any], way: ToolFormat, *, drops_text: bool = False
) -> None:
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": "it-failed"}
        for call in message.get("tool_calls", ())
    ]
    after = [] if results else [ASKED]
    prompt = found.render(sent_back(message, *results, *after), way, tools=[WEATHER])
    assert prompt.count("it-failed") == len(results)
    for call in message.get("tool_calls", ()):
        arguments = call["function"]["arguments"]
        try:
            json.loads(arguments)
        except ValueError:
            # As it was written, in the call or beside it.
            assert arguments in prompt or drops_text
        assert call["function"]["name"] in prompt


EVERY = pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.slow)])
"""One place of so many in a row where an answer is cut."""


@EVERY
@pytest.mark.parametrize("name", TEMPLATES)
def test_an_answer_cut_anywhere_is_rendered(name: str, every: int) -> None:
    found = template_of(TEMPLATES[name])
    own = find_tool_use(found).format
    forced = forced_format(own)
    opening, closing = (f"{mark}\n" if mark else "" for mark in forced.forced)
    call = f'{opening}{{"name": "weather", "{forced.arguments}": {LONG.arguments}}}\n{closing}'
    for way, text, how in (
        (own, f"<think>\nHm.</think>Well. {own.write([LONG])}", {}),
        (own, own.write([LONG, LONG]), {}),
        (forced, call, {"forced": True}),
    ):
        for cut in range(len(name) % every, len(text) + 1, every):
            message = message_of(text[:cut], way, **how)
            check(found, message, way, drops_text=name in DROP_TEXT)


@EVERY
@pytest.mark.parametrize("way", FORMATS, ids=lambda way: way.name)
def test_calls_cut_anywhere_are_written_where_a_template_has_none(
    way: ToolFormat, every: int
) -> None:
    found = template_of(OWN["plain"][0])
    for head in ("", "<think>Hm</think>"):
        text = head + way.write([LONG])
        for cut in range(len(way.name) % every, len(text) + 1, every):
            check(found, message_of(text[:cut], way), way)


ARGUMENTS: list[Any] = [
    "null", "", " ", '{"x": 1', "[1]", "5", '"a"', "{'x': 1}", '{"a": NaN}', '{"a": 1e999}',
    '{"a": 1, "a": 2}', '{"a": "\\ud83d"}', '{"a":' + "[" * 900 + "]" * 900 + "}", "}{", "\\",
    '{"a": %s}' % ("9" * 5000), "[" * 100_000, [1], 5, True, {"x": 1}, None,
]  # fmt: skip
"""What may stand in the place of a call's arguments."""


@pytest.mark.parametrize(
    ("name", "number"),
    one_of(3, [(name, i) for name in TEMPLATES for i in range(len(ARGUMENTS))]),
    ids=str,
)
def test_arguments_of_any_kind_are_rendered(name: str, number: int) -> None:
    arguments = ARGUMENTS[number]
    found = template_of(TEMPLATES[name])
    call = {"id": "call_0", "type": "function"}
    call |= {"function": {"name": "weather", "arguments": arguments}}  # type: ignore[dict-item]
    result = {"role": "tool", "tool_call_id": "call_0", "content": "it-failed"}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    prompt = found.render(sent_back(message, result), tools=[WEATHER])
    assert "it-failed" in prompt
    prompt.encode()  # no half of a pair of surrogates
    if isinstance(arguments, str) and arguments.startswith('{"x"'):
        assert '{"x": 1' in prompt or name in DROP_TEXT


def test_arguments_that_are_cut_stand_in_the_call_where_a_template_takes_text() -> None:
    message = message_of("", FORMATS[0])
    function = {"name": "weather", "arguments": '{"city": "Ul'}
    message["tool_calls"] = [{"id": "call_0", "type": "function", "function": function}]
    shown = template_of(SHOWS_TEXT).render(sent_back(message), tools=[WEATHER])
    assert '"arguments": {"city": "Ul}' in shown
    beside = template_of(OWN["qwen3"][0]).render(sent_back(message), tools=[WEATHER])
    assert '{"city": "Ul<tool_call>\n{"name": "weather", "arguments": {}}' in beside


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_is_only_reasoning_is_taken_back(stream: bool) -> None:
    """At each number of tokens, over HTTP."""
    tokenizer = tokenizer_of(NO_TOOLS + "<think>\n{# </think> #}")
    text = "Theo had a friend</think>\nYes."

    async def use(app: App) -> None:
        for size in range(1, len(text) + 1, 3):
            first = chat_body(max_tokens=size, messages=[ASKED])
            [choice] = (await app.post(CHAT, first)).json()["choices"]
            messages = [ASKED, choice["message"], ASKED]
            reply = await app.post(CHAT, chat_body(max_tokens=1, messages=messages, stream=stream))
            assert reply.status == 200, reply.body

    with_app(saying(spelled(text), tokenizer), use)


def test_the_prompt_has_what_was_cut() -> None:
    tokenizer = tokenizer_of(NO_TOOLS)
    head = '<tool_call>\n{"name": "weather", "arguments": '
    fields = {"tools": [WEATHER], "tool_choice": "required", "messages": [ASKED]}
    body = chat_body(max_tokens=len(head) + 9, **fields)
    engine = saying(spelled(head + '{"city": "Ulm"}'), tokenizer)
    [choice] = ask(engine, CHAT, body).json()["choices"]
    [call] = choice["message"]["tool_calls"]
    assert call["function"]["arguments"] == '{"city": '
    result = {"role": "tool", "tool_call_id": call["id"], "content": "no JSON"}
    body = chat_body(messages=[ASKED, choice["message"], result], tools=[WEATHER])
    reply = ask(saying([], tokenizer), f"{CHAT}/render", body)
    assert reply.status == 200, reply.body
    assert '{"city": ' in reply.json()["prompt"].partition("no JSON")[0]


def test_a_parser_without_thoughts_is_made_of_any_template() -> None:
    for source in TEMPLATES.values():
        assert (
            parser_for(thoughts_in(source), None, prompt_end="").push("Hi", end=True).content
            == "Hi"
        )
