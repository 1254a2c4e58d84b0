"""Tests of published chat templates, of the supported model families and of many others.

Each template renders a tool loop of three turns, in which a client sends our answers back. No
template may refuse it, and each call and each result must be in the prompt.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest

from infer.errors import LoadError, RequestError
from infer.text.answer_parser import parser_for
from infer.text.chat_template import ChatTemplate
from infer.text.tools.call import ToolCall
from infer.text.tools.tool_use import find_tool_use
from tests.support.bad_histories import BAD_HISTORIES, problem
from tests.support.published_templates import LOADED, SPECIAL, templates
from tests.support.role_orders import AGENTS, all_orders, chat_of, words_of
from tests.support.tool_conversations import LOOPS, QUESTION, WEATHER

pytestmark = [pytest.mark.peer, pytest.mark.timeout(900)]


@cache
def template(name: str) -> ChatTemplate:
    return ChatTemplate(templates()[name], SPECIAL)


def loadable() -> Iterator[tuple[str, ChatTemplate]]:
    """All published templates that compile, by their names."""
    for name in templates():
        try:
            shown = template(name)
        except LoadError:
            continue
        yield name, shown


@pytest.mark.parametrize("name", LOADED)
def test_the_format_of_a_loaded_family(name: str) -> None:
    use = find_tool_use(template(name))
    assert (use.format.name, use.is_known) == (LOADED[name], True)


@pytest.mark.parametrize("name", LOADED)
def test_what_a_loaded_family_answers_is_taken_back(name: str) -> None:
    """Three calls are each read from a text in the family's format; then all are rendered."""
    shown = template(name)
    use = find_tool_use(shown)
    messages: list[dict[str, Any]] = [QUESTION]
    for i, city in enumerate(("Ulm", "Bonn", "Jena")):
        prompt = shown.render(messages, tools=WEATHER)
        text = use.format.write([ToolCall("weather", json.dumps({"city": city}))])
        if use.format.prompt_opens and prompt.endswith(use.format.prompt_opens):
            text = text.removeprefix(use.format.prompt_opens)
        if prompt.rstrip().endswith("<think>"):
            text = f"hm\n</think>\n\n{text}"
        parser = parser_for(
            shown.thoughts, use.format, prompt_end=prompt[-40:], names=["weather"], forced=False
        )
        parts = parser.push(text, end=True)
        assert not parts.content
        [call] = parts.calls
        function = {"name": call.name, "arguments": json.loads(call.arguments)}
        call_id = f"call_0123456789abcdef0123456789abcdef_0_{i}"
        made = {"id": call_id, "type": "function", "function": function}
        messages += [
            {"role": "assistant", "content": None, "tool_calls": [made]},
            {"role": "tool", "tool_call_id": call_id, "content": f"{city} is sunny"},
        ]
    messages += [{"role": "assistant", "content": "All are."}, {"role": "user", "content": "So?"}]
    text = shown.render(messages, tools=WEATHER)
    for city in ("Ulm", "Bonn", "Jena"):
        assert 0 <= text.find(city) < text.find(f"{city} is sunny"), text


def test_no_published_template_refuses_a_tool_loop() -> None:
    num_loops = num_writing = 0
    failed = []
    for name, shown in loadable():
        num_writing += shown.abilities.calls is not None
        for loop, messages in LOOPS.items():
            num_loops += 1
            try:
                text = shown.render(messages, tools=WEATHER)
            except Exception as error:
                failed.append((name, loop, str(error)[:200]))
                continue
            cities = [city for city in ("Ulm", "Bonn", "Jena") if city in str(messages)]
            if not all(0 <= text.find(city) < text.find(f"{city} is sunny") for city in cities):
                failed.append((name, loop, "a call or a result is missing"))
    print(f"{len(templates())} templates, {num_writing} write calls, {num_loops} loops")
    assert not failed
    assert num_writing > 90
    assert num_loops > 600


def test_all_system_messages_at_the_beginning_are_in_the_prompt() -> None:
    """Two and three, of both roles, with tools and without."""
    rules = ("Rule of kindness.", "Rule of brevity.", "Rule of clarity.")
    roles = (("system",), ("system",) * 2, ("system", "developer"), ("developer",) * 3)
    num_several = num_chats = 0
    failed = []
    for name, shown in loadable():
        num_several += shown.abilities.order.takes_several_systems
        chats = itertools.product(roles, (None, WEATHER))
        for each, tools in chats:
            messages = [{"role": r, "content": t} for r, t in zip(each, rules, strict=False)]
            num_chats += 1
            try:
                text = shown.render([*messages, QUESTION], tools=tools)
            except RequestError as error:
                text = str(error)
            shown_rules = sorted(rules[: len(each)], key=text.find)
            if shown_rules != list(rules[: len(each)]) or any(
                text.count(r) != 1 for r in shown_rules
            ):
                failed.append((name, each, tools is not None, text[:200]))
    print(f"{num_several} templates take several, {num_chats} chats")
    assert not failed
    assert num_several > 90
    assert num_chats > 1100


MOVES_TOOLS = (  # they stand before the last question
    "axolotl/mistral_v2v3",
    "axolotl/mistral_v3_tekken",
    "llama.cpp/Mistral-Small-3.2-24B-Instruct-2506",
    "llama.cpp/mistralai-Mistral-Nemo-Instruct-2407",
)
HAS_CLOCK = "llama.cpp/fireworks-ai-llama-3-firefunction-v2"


def test_no_order_of_roles_is_refused_or_loses_a_word() -> None:
    """All that agents send, and all orders of four messages; no template is left out.

    A text beside a call is a message of its own here, which four templates cannot render.
    """
    num_chats, failed = 0, []
    for name, shown in loadable():
        for order in [*AGENTS.values(), *all_orders(4)]:
            if "AC" in order and name in MOVES_TOOLS:
                continue
            words = words_of(order)
            for tools in (WEATHER,) if "C" in order else (None, WEATHER):
                num_chats += 1
                try:
                    text = shown.render(chat_of(order), shown.abilities.format, tools=tools)
                except RequestError as error:
                    failed.append((name, order, str(error)[:200]))
                    continue
                places = [text.find(word) for word in words]
                if places != sorted(places) or any(text.count(word) != 1 for word in words):
                    failed.append((name, order, "a word is missing, twice or elsewhere"))
    print(f"{num_chats} chats")
    assert not failed
    assert num_chats > 20_000


def test_calls_and_results_that_do_not_belong_together() -> None:
    failed = []
    for name, shown in loadable():
        for history, messages in BAD_HISTORIES.items():
            for tools in (None, WEATHER):
                try:
                    text = shown.render(messages, shown.abilities.format, tools=tools)
                except RequestError as error:
                    failed.append((name, history, str(error)[:200]))
                    continue
                if (said := problem(text, messages)) is not None:
                    failed.append((name, history, said))
    assert not failed


def test_a_further_turn_changes_nothing_before_it() -> None:
    """Except for what templates do themselves: thoughts are taken out behind a question."""
    num_turns, failed = 0, []
    for name, shown in loadable():
        if name in (*MOVES_TOOLS, HAS_CLOCK):
            continue

        @cache
        def prompt(order: str, shown: ChatTemplate = shown) -> str:
            way = shown.abilities.format
            return shown.render(chat_of(order), way, tools=WEATHER, add_generation_prompt=False)

        for order in AGENTS.values():
            for i in range(1, len(order)):
                is_turn = order[i] in "AC" and "A" not in order[i - 1 : i]
                if not is_turn or ("U" in order[i:] and shown.abilities.order.forgets_thoughts):
                    continue
                num_turns += 1
                before, last = prompt(order[:i]), words_of(order[:i])[-1]
                size = before.rindex(last) + len(last)
                if prompt(order)[:size] != before[:size]:
                    failed.append((name, order, i))
    print(f"{num_turns} turns")
    assert not failed
    assert num_turns > 700


UNKNOWN = ("llama.cpp/CohereForAI-c4ai-command-r-plus-tool_use",)
"""Templates that write calls in a format that is not in the table."""


def test_every_template_that_writes_calls_has_a_known_format() -> None:
    names, unknown = set[str](), []
    for name, shown in loadable():
        use = find_tool_use(shown)
        if shown.abilities.calls is not None and not use.is_known:
            unknown.append(name)
        names.add(use.format.name)
    print(f"{len(names)} formats")
    assert tuple(unknown) == UNKNOWN
    assert len(names) > 25
