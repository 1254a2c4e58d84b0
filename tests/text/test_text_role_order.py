"""Orders of roles that agents send: each text is in the prompt once, in its place, and stays there.

Each template is of a kind that is published: it refuses an order, leaves a message out without a
word, or moves it. Others take them all, and get them as they are. All orders up to a length are
tried.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from infer.errors import RequestError
from infer.text.chat_template import ChatTemplate
from infer.text.role_order import in_order
from infer.text.template_probes import find_abilities
from tests.support.cases import over
from tests.support.ready_templates import template_of
from tests.support.role_orders import AGENTS, all_orders, chat_of, words_of
from tests.support.tool_conversations import (
    END,
    HERMES_CALLS,
    LOOP,
    OWN,
    QUESTION,
    TEMPLATES,
    TOOLS,
    WEATHER,
)

BEGINNING = (  # Qwen 3.5's
    TOOLS + LOOP + "{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
    "<{{ m.role }}>{{ m.content | trim }}" + END
)
ALTERNATING = (  # Mistral's: after one system message, users and answers alternate
    "{% if messages[0].role == 'system' %}<system>{{ messages[0].content }}"
    "{% set rest = messages[1:] %}{% else %}{% set rest = messages %}{% endif %}"
    "{% for m in rest %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}<{{ m.role }}>{{ m.content }}" + END
)
FIRST = (  # gpt-oss's and SmolLM3's: the first one is the head, further ones are left out
    "<head>{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}"
    + LOOP
    + "{% if m.role != 'system' %}<{{ m.role }}>{{ m.content }}{% endif %}"
    + END
)
LAST = (  # DeepSeek R1's: each one replaces the one before
    "{% set ns = namespace(rules='') %}"
    "{% for m in messages %}{% if m.role == 'system' %}{% set ns.rules = m.content %}{% endif %}"
    "{% endfor %}{{ ns.rules }}"
    + LOOP
    + "{% if m.role != 'system' %}<{{ m.role }}>{{ m.content }}{% endif %}"
    + END
)
TWICE = (  # the head repeats what the loop renders again
    "{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}"
    + LOOP
    + "{% if not (loop.first and loop.length == 2) %}<{{ m.role }}>{{ m.content }}{% endif %}"
    + END
)
WITH_TOOLS = (  # takes several, but only the first one beside tools
    "{% if tools %}{{ messages[0].content }}{{ tools | tojson }}{% endif %}"
    + LOOP
    + "{% if not tools or m.role != 'system' %}<{{ m.role }}>{{ m.content }}{% endif %}"
    + END
)
PARTS = (  # content is a list of parts, of one system message
    LOOP + "{% if m.role != 'system' or loop.first %}<{{ m.role }}>"
    "{% for p in m.content %}{{ p.text | trim }}{% endfor %}{% endif %}" + END
)
ONE = {
    "beginning": BEGINNING,
    "alternating": ALTERNATING,
    "first": FIRST,
    "last": LAST,
    "twice": TWICE,
    "with tools": WITH_TOOLS,
    "parts": PARTS,
    "gemma3": (TEMPLATES / "gemma3.jinja").read_text(encoding="utf-8"),
}
"""Templates that do not render all of several system messages."""
RULES = ("Be kind.", "Be short.", "Be clear.", "Be quick.")
FORMS: dict[str, Any] = {
    "text": lambda text: text,
    "a part": lambda text: [{"type": "text", "text": text}],
}


def chats(count: int) -> list[list[dict[str, Any]]]:
    """`count` messages with each of the two roles of rules, and a question; in every form."""
    made = []
    for roles in itertools.product(("system", "developer"), repeat=count):
        for form in FORMS.values():
            rules = zip(roles, RULES, strict=False)
            made.append([{"role": r, "content": form(text)} for r, text in rules] + [QUESTION])
    return made


@pytest.mark.parametrize("name", ONE)
@over("count", [1, 2, 3, 4])
@over("tools", [None, WEATHER])
def test_every_text_is_in_the_prompt_once(name: str, count: int, tools: Any) -> None:
    shown, joined = template_of(ONE[name]), "\n\n".join(RULES[:count])
    assert not shown.abilities.order.takes_several_systems
    for messages in chats(count):
        text = shown.render(messages, tools=tools)
        assert text.count(joined) == 1, (messages, text)
        assert all(text.count(rule) == 1 for rule in RULES[:count]), text
        assert text.index(joined) < text.index("Weather?")
        # The message alone, written by hand, gives the same prompt.
        alone = [{"role": "system", "content": joined}, QUESTION]
        assert text == shown.render(alone, tools=tools)


@pytest.mark.parametrize("name", ["qwen25", "qwen3", "plain", "llama32"])
def test_a_template_that_takes_several_gets_them_as_they_are(name: str) -> None:
    shown = template_of(OWN[name][0])
    assert shown.abilities.order.takes_several_systems
    for messages in chats(3):
        text = shown.render(messages)
        assert "\n\n".join(RULES[:2]) not in text
        places = [text.index(rule) for rule in RULES[:3]]
        assert places == sorted(places)
        assert text.count("system") == 3


def test_without_the_role_the_text_is_the_users() -> None:
    """A template without system messages gets them in the first question, as Gemma's does."""
    strict = template_of(OWN["strict"][0])
    assert not strict.abilities.order.takes_system
    for messages in chats(2):
        assert strict.render(messages) == "<user>Be kind.\n\nBe short.\n\nWeather?<assistant>"


@pytest.mark.parametrize("alone", [False, True])
def test_a_chat_of_rules_without_text_has_a_message(alone: bool) -> None:
    order = template_of(OWN["strict"][0]).abilities.order
    made = in_order([{"role": "system"}], replace(order, takes_system_alone=alone))
    assert made == [{"role": "user", "content": ""}]


def in_one(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return in_order(messages, template_of(BEGINNING).abilities.order)


def test_messages_are_not_changed_in_place() -> None:
    messages = [{"role": "system", "content": c, "name": "n"} for c in ("a", "", "b")]
    made = in_one([*messages, QUESTION])
    assert made == [{"role": "system", "content": "a\n\nb", "name": "n"}, QUESTION]
    assert [m["content"] for m in messages] == ["a", "", "b"]
    assert in_one([QUESTION]) == [QUESTION]
    assert in_one([]) == []
    # Parts are text, without white space that nobody wrote.
    two = [{"type": "text", "text": "Be "}, {"type": "text", "text": "kind."}]
    assert in_one([{"role": "system", "content": two}, messages[2]])[0]["content"] == (
        "Be kind.\n\nb"
    )
    # A part that is no text stays one; text around it keeps its blank lines.
    image = {"type": "image", "url": "x"}
    parts = in_one([messages[0], {"role": "system", "content": [image]}, QUESTION])[0]
    blank = {"type": "text", "text": "\n\n"}
    assert parts["content"] == [{"type": "text", "text": "a"}, blank, image]


def test_no_text_is_continued_twice() -> None:
    messages = [{"role": "system", "content": rule} for rule in RULES[:2]]
    text = template_of(BEGINNING).render(
        messages, add_generation_prompt=False, continue_final_message=True
    )
    assert text == "<system>Be kind.\n\nBe short."


def test_a_probe_that_fails_is_no_ability() -> None:
    def refuses(messages: Any, variables: Any) -> str:
        raise RequestError("no")

    order = find_abilities(refuses, ()).order
    assert not any(getattr(order, name) for name in order.__slots__)


# ---- all orders

BODY = "<{{ m.role }}>{{ m.content or '' }}" + HERMES_CALLS
REFUSES_LATE = (  # Qwen 3.5's
    TOOLS + LOOP + "{% if m.role == 'system' and not loop.first %}{{ raise_exception('late') }}"
    "{% endif %}" + BODY + END
)
DROPS_LATE = (  # gpt-oss's, SmolLM3's, MiniMax's
    TOOLS + "<head>{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}"
    + LOOP + "{% if m.role != 'system' %}" + BODY + "{% endif %}" + END
)  # fmt: skip
MOVES_TO_FRONT = (  # DeepSeek V3's: all system messages are the head
    TOOLS + LOOP + "{% if m.role == 'system' %}{{ m.content }}{% endif %}{% endfor %}"
    + LOOP + "{% if m.role != 'system' %}" + BODY + "{% endif %}" + END
)  # fmt: skip
MOVES_TO_LAST = (  # Mistral Nemo's: with the last question, and only if it is the last message
    "{% if messages[0].role == 'system' %}{% set head = messages[0].content %}"
    "{% set rest = messages[1:] %}{% else %}{% set head = '' %}{% set rest = messages %}{% endif %}"
    + TOOLS + "{% for m in rest %}{% if m.role == 'system' %}{{ raise_exception('late') }}"
    "{% endif %}{% if loop.last and m.role == 'user' %}{{ head }}{% endif %}" + BODY + END
)  # fmt: skip
ALTERNATES = (  # Mistral's: questions and answers alternate; calls and results do not count
    TOOLS + "{% set ns = namespace(n=0) %}" + LOOP +
    "{% if m.role == 'system' %}{% if not loop.first %}{{ raise_exception('late') }}{% endif %}"
    "{% elif m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}"
    "{% if (m.role == 'user') != (ns.n % 2 == 0) %}{{ raise_exception('alternate') }}{% endif %}"
    "{% set ns.n = ns.n + 1 %}{% endif %}" + BODY + END
)  # fmt: skip
DROPS_FIRST_USER = (  # each question replaces the one before
    TOOLS + LOOP + "{% if not (m.role == 'user' and not loop.last and"
    " messages[loop.index0 + 1].role == 'user') %}" + BODY + "{% endif %}" + END
)  # fmt: skip
OWN_RULES = (  # Apriel's: has a text of its own unless there is a system message anywhere
    TOOLS + "{% if 'system' not in messages | map(attribute='role') | list %}Be.{% endif %}"
    + LOOP + BODY + END
)  # fmt: skip
FORGETS = (  # Qwen3's: reasoning stands behind the last question only
    TOOLS + "{% set ns = namespace(last=0) %}" + LOOP + "{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}" + LOOP +
    "{% if m.role == 'system' and not loop.first %}{{ raise_exception('late') }}{% endif %}"
    "{% if loop.index0 > ns.last and m.reasoning_content %}({{ m.reasoning_content }}){% endif %}"
    + BODY + END
)  # fmt: skip
WANTS_LIST = (  # Hermes 2 Pro's: needs a list of tools
    "{% for t in tools %}{{ t | tojson }}{% endfor %}" + LOOP + BODY + END
)
ALL_PARTS = (  # content is a list of parts, and roles alternate
    TOOLS + LOOP + "{% if not loop.first and m.role == 'user' and"
    " messages[loop.index0 - 1].role in ('user', 'tool') %}{{ raise_exception('row') }}{% endif %}"
    "{% if m.role == 'system' and not loop.first %}{{ raise_exception('late') }}{% endif %}"
    "<{{ m.role }}>{% for p in m.content or [] %}{{ p.text | trim }}{% endfor %}"
    + HERMES_CALLS + END
)  # fmt: skip
KINDS = {
    "refuses late": REFUSES_LATE,
    "drops late": DROPS_LATE,
    "moves to the front": MOVES_TO_FRONT,
    "moves to the last": MOVES_TO_LAST,
    "alternates": ALTERNATES,
    "drops the first user": DROPS_FIRST_USER,
    "own rules": OWN_RULES,
    "forgets": FORGETS,
    "wants a list": WANTS_LIST,
    "all parts": ALL_PARTS,
    **{name: ONE[name] for name in ("first", "last")},
    **{f"own {name}": OWN[name][0] for name in OWN},
}
TEXTS_BESIDE_CALLS = ("own python", "own llama32", "own nine", "own strict")
"""Templates that leave out the text beside a call, as in training, or need a question between."""


def find_loss(shown: ChatTemplate, order: str, tools: Any, **options: Any) -> str:
    """What is wrong with the prompt of an order; "": nothing."""
    text = shown.render(chat_of(order), shown.abilities.format, tools=tools, **options)
    words = words_of(order)
    places = [text.find(word) for word in words]
    if places != sorted(places) or any(text.count(word) != 1 for word in words):
        return f"{order}: {text}"
    return ""


LONGEST = 4
Kind = tuple[str, ChatTemplate, list[str]]
"""Name, template, and orders to try."""


def _kinds() -> Iterator[Any]:
    """Each kind with the number of the quarter of the longest orders that it is tried with, and
    with -m slow with all of them."""
    for i, name in enumerate(KINDS):
        yield pytest.param((name, range(i % 4, i % 4 + 1)), id=name)
        yield pytest.param((name, range(4)), id=f"{name}, all", marks=pytest.mark.slow)


@pytest.fixture(scope="module", params=_kinds())
def kind(request: pytest.FixtureRequest) -> Kind:
    """Its tests follow each other, while its process is there."""
    name, quarters = request.param
    short, longest = list(all_orders(LONGEST - 1)), list(all_orders(LONGEST))
    longest = longest[len(short) :]
    some = [order for i in quarters for order in longest[i::4]]
    return name, template_of(KINDS[name]), [*AGENTS.values(), *short, *some]


def test_every_order_is_rendered_whole(kind: Kind) -> None:
    (name, shown, orders), num_orders = kind, 0
    for order in orders:
        if "AC" in order and name in TEXTS_BESIDE_CALLS:
            continue
        for tools in (WEATHER,) if "C" in order else (None, WEATHER):
            num_orders += 1
            assert not find_loss(shown, order, tools)
    assert num_orders > 80


def test_a_further_turn_changes_nothing_before_it(kind: Kind) -> None:
    """Also where a template takes reasoning out behind a question: a reminder is none."""
    (name, shown, orders), num_turns = kind, 0

    @cache
    def prompt(order: str) -> str:
        return shown.render(
            chat_of(order, thinks=name == "forgets"), shown.abilities.format, tools=WEATHER,
            add_generation_prompt=False,
        )  # fmt: skip

    for order in orders:
        if ("AC" in order and name in TEXTS_BESIDE_CALLS) or name == "own functions":  # has a clock
            continue
        turns = [i for i in range(1, len(order)) if order[i] in "AC" and order[i - 1] not in "A"]
        for i in turns:
            if name == "forgets" and ("U" in order[i:] or "AS" in order[i:]):
                continue  # a question
            num_turns += 1
            before, whole = prompt(order[:i]), prompt(order)
            size = before.rindex(words_of(order[:i])[-1]) + len(words_of(order[:i])[-1])
            assert whole[:size] == before[:size], order
    assert num_turns > 60 or name == "own functions"


LATE = {
    "refuses late": "<user>1-U<user><system-reminder>\n2-S\n</system-reminder>",
    "alternates": "<user>1-U\n\n<system-reminder>\n2-S\n</system-reminder>",
    "all parts": "<user>1-U\n\n<system-reminder>\n2-S\n</system-reminder>",
    "own plain": "<user>1-U<system>2-S",
}


@pytest.mark.parametrize("name", LATE)
def test_a_late_system_message_stands_at_its_place(name: str) -> None:
    text = template_of(KINDS[name]).render(chat_of("SUS"))
    assert text == f"<system>0-S{LATE[name]}<assistant>"


def test_a_reminder_is_marked_once_and_an_empty_one_is_none() -> None:
    marked = "<system-reminder>be quick</system-reminder>"
    contents: list[Any] = [marked, " ", "", []]
    late = [{"role": "system", "content": content} for content in contents]
    text = template_of(REFUSES_LATE).render([QUESTION, *late])
    assert text == f"<user>Weather?<user>{marked}<assistant>"


def test_a_reminder_behind_a_result_takes_no_reasoning_away() -> None:
    shown = template_of(FORGETS)
    assert shown.abilities.order.forgets_thoughts
    text = shown.render(chat_of("UCS", thinks=True), tools=WEATHER)
    assert "(why-1)" in text
    assert "1-R\n\n<system-reminder>\n2-S\n</system-reminder><assistant>" in text
    assert "(why-1)" not in shown.render(chat_of("UCU", thinks=True), tools=WEATHER)


@pytest.mark.parametrize("name", OWN)
def test_a_list_without_parts_is_an_empty_text(name: str) -> None:
    shown = template_of(OWN[name][0])
    contents: tuple[Any, ...] = ([], "")
    one, other = (
        [{"role": "user", "content": content}, {"role": "assistant", "content": "Yes."}, QUESTION]
        for content in contents
    )
    assert shown.render(one, datetime="now") == shown.render(other, datetime="now")
