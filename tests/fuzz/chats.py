"""Chats and answers with tool calls: strategies, and what must hold for each example.

`python tests/fuzz/chats.py [--minutes 10] [--seed N]` tries examples until the time is over, and
ends with the smallest one that breaks something. Three things are tried:

- an answer's text, in each format and cut anywhere, is told apart as it is whole, and nothing of it
  is lost;
- a conversation is rendered by a template, or refused by a `RequestError`; also by templates that
  support and refuse what no published one does, and with entries of any type;
- a chat's body is answered, or refused with a status below 500.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import copy
import json
import sys
import time
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

from infer.errors import RequestError
from infer.text.chat_template import ChatTemplate
from infer.text.role_order import RoleOrder
from infer.text.template_probes import ABSENT, Abilities, CallStyle
from infer.text.tools.call import ToolCall
from infer.text.tools.formats import FORMATS, FUNCTIONARY_32, THOUGHTS, ToolFormat
from tests.fuzz.call import MODEL, Call
from tests.fuzz.json_edits import edited
from tests.support.ready_templates import template_of
from tests.support.serving import CHAT, App, scripted, serving, spelled
from tests.support.tool_answers import CASES, NAMES, told_apart
from tests.support.tool_conversations import OWN

CHARS = st.sampled_from([*"ab1 {}[]()\"'\\,:;=\n<>|`/_-.", "é", "\u2028", "\U0001f98a", "\x00"])
WORDS = st.text(CHARS, max_size=8)
MARKS = sorted(
    {mark for way in FORMATS for mark in way.all_marks}
    | {mark for pair in THOUGHTS for mark in pair.marks}
    | {"```json\n", "```", "</tool_call>", "all\n", "f(a=1)", '{"name": "f", "arguments": {}}'}
)
ROUND = 200
"""Examples of one kind before it is another's turn."""


# ---- answers


def json_values(strings: SearchStrategy[str] = WORDS) -> SearchStrategy[Any]:
    """What a call's arguments may have in them."""
    numbers = st.one_of(st.integers(-(10**18), 10**18), st.floats(-1e9, 1e9))
    leaves = st.one_of(st.none(), st.booleans(), numbers, strings)
    keys = st.sampled_from(["a", "b_c", "d1"])
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.lists(inner, max_size=3), st.dictionaries(keys, inner, max_size=3)
        ),
        max_leaves=8,
    )


def made_calls(strings: SearchStrategy[str] = WORDS) -> SearchStrategy[list[ToolCall]]:
    """One to three calls of the request's tools."""
    keys = st.sampled_from(["a", "city", "x_1"])
    arguments = st.dictionaries(keys, json_values(strings), max_size=3)
    one = st.builds(
        lambda name, given: ToolCall(name, json.dumps(given, ensure_ascii=False)),
        st.sampled_from(NAMES),
        arguments,
    )
    return st.lists(one, min_size=1, max_size=3)


def answers() -> SearchStrategy[str]:
    """Texts of marks, calls, words and pieces of known answers, one behind the other."""
    written = st.builds(lambda way, calls: way.write(calls), st.sampled_from(FORMATS), made_calls())
    known = st.sampled_from([text for _, text, _ in CASES if len(text) < 200])
    pieces = st.one_of(st.sampled_from(MARKS), WORDS, written, known)
    texts = st.lists(pieces, max_size=7).map("".join)
    cut = st.builds(lambda text, a, b: text[: a % (len(text) + 1)] + text[b % (len(text) + 1) :],
                    texts, st.integers(0, 400), st.integers(0, 400))  # fmt: skip
    return st.one_of(texts, texts, cut)


def check_answer(data: st.DataObject) -> None:
    """Cut anywhere, an answer means the same; what is no call and no thought is content."""
    text = data.draw(answers())
    way: ToolFormat | None = data.draw(st.sampled_from([None, *FORMATS]))
    how: dict[str, Any] = {
        "thinks": data.draw(st.booleans()),
        "inside": data.draw(st.booleans()),
        "thoughts": data.draw(st.sampled_from(THOUGHTS)),
        "names": data.draw(st.sampled_from([None, NAMES])),
        "opened": way is FUNCTIONARY_32 and data.draw(st.booleans()),
    }
    whole = told_apart([text], way, **how)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert told_apart(pieces, way, **how) == whole, (way and way.name, pieces)
    assert told_apart([*pieces, ""], way, **how) == whole, (way and way.name, pieces)
    for call in whole.calls:  # of arguments that break off there is what the model wrote
        assert call.arguments in text or isinstance(json.loads(call.arguments), dict)
    if not whole.calls and not whole.reasoning and not how["inside"] and "all" not in text:
        left = text.lstrip()
        if how["thinks"]:
            left = left.removeprefix(how["thoughts"].opening).lstrip()
            left = left.removeprefix(how["thoughts"].closing)
        assert "".join(whole.content.split()) == "".join(left.split()), (way and way.name, text)


def check_written(data: st.DataObject) -> None:
    """What a format writes it reads, whatever the arguments say and wherever it is cut."""
    way = data.draw(st.sampled_from(FORMATS))
    # Where arguments are no JSON, or several marks stand around each call, marks would end them.
    with_marks = way.name not in ("deepseek", "functiongemma", "gemma4")
    strings = st.one_of(WORDS, st.sampled_from(MARKS)) if with_marks else st.text("ab \"'{}\n:é,")
    calls = data.draw(made_calls(strings))
    text = way.write(calls)
    cut = data.draw(st.integers(0, len(text)))
    found = told_apart([text[:cut], text[cut:]], way, names=NAMES)
    expected = [(call.name, json.loads(call.arguments)) for call in calls]
    assert [(call.name, json.loads(call.arguments)) for call in found.calls] == expected, text
    assert not found.content


# ---- conversations


def tool_definitions() -> SearchStrategy[list[Any]]:
    """Tools with much, little and wrong in them."""
    parameters = st.sampled_from(
        [
            {"type": "object", "properties": {"city": {"type": "string"}}},
            {"type": "object"},
            {},
            {"properties": {"a": 5}},
            {"type": "object", "properties": None},
        ]
    )
    function = st.fixed_dictionaries(
        {"name": st.sampled_from([*NAMES, "<tool_call>", "a b", ""])},
        optional={"description": WORDS, "parameters": parameters, "strict": st.booleans()},
    )
    one = st.builds(lambda inner: {"type": "function", "function": inner}, function)
    return st.lists(one, max_size=3)


def messages() -> SearchStrategy[list[Any]]:
    """Conversations in which roles, calls and results come in any order."""
    texts = st.one_of(WORDS, st.sampled_from(MARKS), st.none())
    parts = st.lists(st.builds(lambda text: {"type": "text", "text": text}, WORDS), max_size=2)
    ids = st.sampled_from(["call_1", "call_2", "abcdefghi", "", "é" * 9])
    arguments = st.one_of(
        st.dictionaries(st.sampled_from(["a", "b"]), json_values(), max_size=2),
        st.dictionaries(st.sampled_from(["a", "b"]), json_values(), max_size=2).map(json.dumps),
        st.sampled_from(["", "{", "[]", None, 5]),
    )
    call = st.fixed_dictionaries(
        {
            "function": st.fixed_dictionaries(
                {"name": st.sampled_from(NAMES)}, optional={"arguments": arguments}
            )
        },
        optional={"id": ids, "type": st.just("function"), "index": st.integers(0, 3)},
    )
    message = st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant", "assistant", "tool", "tool"])},
        optional={
            "content": st.one_of(texts, texts, parts),
            "tool_calls": st.one_of(st.none(), st.lists(call, max_size=3)),
            "tool_call_id": ids,
            "name": st.sampled_from(NAMES),
            "reasoning": texts,
            "reasoning_content": texts,
        },
    )
    return st.lists(message, min_size=1, max_size=6)


def check_rendered(data: st.DataObject, templates: dict[str, ChatTemplate]) -> None:
    """A prompt, or a refusal."""
    name = data.draw(st.sampled_from(sorted(templates)))
    with contextlib.suppress(RequestError):
        templates[name].render(
            data.draw(messages()),
            tools=data.draw(st.one_of(st.none(), tool_definitions())),
            continue_final_message=(ends := data.draw(st.booleans())),
            add_generation_prompt=not ends and data.draw(st.booleans()),
        )


def anything() -> SearchStrategy[Any]:
    """JSON of any type, in place of what belongs there."""
    return st.one_of(
        json_values(),
        st.sampled_from([{}, [], [[]], [{}], {"type": "text"}, {"type": "image_url"}, "", 0, True]),
    )


def odd_messages() -> SearchStrategy[Any]:
    """Conversations in which something is of another type or absent."""
    return edited(messages(), anything(), max_depth=6)


def is_list(chat: Any) -> bool:
    """Whether a conversation is one still."""
    return isinstance(chat, list)


def odd_tools() -> SearchStrategy[Any]:
    """Tools in which something is of another type or absent."""
    return edited(tool_definitions(), anything())


def check_any_template(data: st.DataObject, template: ChatTemplate) -> None:
    """A prompt, or a refusal, by whatever a template might support."""
    yes_or_no = st.booleans()
    style = st.builds(
        CallStyle, st.sampled_from(["", None, ABSENT]), yes_or_no, yes_or_no,
        st.sampled_from(["own", "short", "named"]), yes_or_no, yes_or_no, yes_or_no,
    )  # fmt: skip
    able = copy.copy(template)
    able.abilities = data.draw(
        st.builds(
            Abilities,
            takes_parts=yes_or_no,
            wants_parts=yes_or_no,
            order=st.builds(RoleOrder, *[yes_or_no for _ in fields(RoleOrder)]),
            tools_variable=st.sampled_from(["tools", None]),
            tools_are_text=yes_or_no,
            fills_tools=yes_or_no,
            needs_list=yes_or_no,
            calls=st.one_of(st.none(), style, style),
            takes_results=yes_or_no,
            takes_lone_results=yes_or_no,
            format=st.sampled_from([None, *FORMATS]),
            no_text=st.sampled_from(["", " "]),
        )
    )
    with contextlib.suppress(RequestError):
        able.render(
            data.draw(st.one_of(odd_messages().filter(is_list), messages())),
            tools=data.draw(st.one_of(st.none(), tool_definitions(), odd_tools())),
            continue_final_message=(ends := data.draw(yes_or_no)),
            add_generation_prompt=not ends,
        )


# ---- bodies


def chat_bodies() -> SearchStrategy[dict[str, Any]]:
    """Bodies of a chat, most of them well formed."""
    choices = st.sampled_from(
        ["auto", "none", "required", {"type": "function", "function": {"name": "f"}}, "any", 5]
    )
    efforts = st.sampled_from(["none", "low", "high", "huge", 5])
    forms = st.sampled_from(
        [
            {"type": "text"},
            {"type": "json_object"},
            {"type": "json_object", "schema": {"type": "object"}},
            {"type": "json_object", "schema": 5},
        ]
    )
    options = {
        "tools": st.one_of(tool_definitions(), odd_tools()),
        "tool_choice": choices,
        "parallel_tool_calls": st.booleans(),
        "stream": st.booleans(),
        "n": st.integers(1, 2),
        "max_tokens": st.integers(1, 40),
        "reasoning_effort": efforts,
        "include_reasoning": st.booleans(),
        "response_format": forms,
        "return_token_ids": st.booleans(),
        "logprobs": st.booleans(),
        "stop": st.one_of(st.sampled_from(MARKS), st.lists(WORDS, max_size=2)),
        "skip_special_tokens": st.booleans(),
        "chat_template_kwargs": st.dictionaries(
            st.sampled_from(["enable_thinking", "x", "datetime"]), WORDS, max_size=2
        ),
    }
    chats = st.one_of(messages(), odd_messages())
    return st.fixed_dictionaries({"messages": chats}, optional=options)


def calls() -> SearchStrategy[Call]:
    """Such bodies for a server, with short answers."""

    def call(body: dict[str, Any]) -> Call:
        return Call("POST", CHAT, {"model": MODEL, "max_tokens": 8, **body})

    return chat_bodies().map(call)


async def check_body(app: App, body: dict[str, Any]) -> None:
    """Answered or refused, and a stream that began has ended well."""
    reply = await app.post(CHAT, {"model": "hash-model", "seed": 1, **body})
    assert reply.status < 500, (reply.status, reply.body)
    if reply.status == 200 and body.get("stream"):
        assert reply.body.endswith(b"data: [DONE]\n\n"), reply.body


def own_templates() -> dict[str, ChatTemplate]:
    """The templates of the tests."""
    return {name: template_of(source) for name, (source, _) in OWN.items()}


def try_examples(check: Callable[[st.DataObject], None], count: int, number: int | None) -> None:
    """So many examples of a check; `number`: a seed, None: the same ones each time."""
    limits = settings(
        max_examples=count,
        deadline=None,
        database=None,
        derandomize=number is None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=[*HealthCheck],
    )
    run = given(st.data())(check)
    limits(run if number is None else seed(number)(run))()


def checks(loop: asyncio.AbstractEventLoop, app: App) -> dict[str, Callable[[Any], None]]:
    """All of them, by name."""
    templates = own_templates()

    def body(data: st.DataObject) -> None:
        loop.run_until_complete(check_body(app, data.draw(chat_bodies())))

    return {
        "answers": check_answer,
        "written calls": check_written,
        "conversations": lambda data: check_rendered(data, templates),
        "any template": lambda data: check_any_template(data, templates["plain"]),
        "bodies": body,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    arguments = parser.parse_args()
    ends_s = time.monotonic() + 60 * arguments.minutes
    number, counts = arguments.seed, dict[str, int]()
    script = spelled('<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>')
    with asyncio.Runner() as runner:
        loop = runner.get_loop()
        opened = serving(scripted(script, max_seq_len=4096, num_pages=4096))
        app = runner.run(opened.__aenter__())
        while time.monotonic() < ends_s:
            for name, check in checks(loop, app).items():
                number += 1
                try_examples(check, ROUND, number)
                counts[name] = counts.get(name, 0) + ROUND
        runner.run(opened.__aexit__(None, None, None))
    print(f"nothing broke (seeds {arguments.seed + 1} to {number}): {counts}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
