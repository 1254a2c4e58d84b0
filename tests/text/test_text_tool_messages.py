"""Tests of tool loops with templates that differ: what the probes find, and what is rendered.

The templates are our own. Each has one peculiarity of published templates, which are themselves
tested in `test_text_published_templates.py`.
"""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from infer.errors import RequestError
from infer.text.template_probes import short_id
from infer.text.tools.formats import (
    PYTHONIC,
)
from infer.text.tools.tool_use import find_tool_use
from tests.support.bad_histories import BAD_HISTORIES, MORE, USER, calls, problem, result
from tests.support.cases import over
from tests.support.ready_templates import template_of
from tests.support.tool_conversations import (
    END,
    HERMES_CALLS,
    LOOP,
    LOOPS,
    NINE,
    NULL_IS_PRINTED,
    OWN,
    PLAIN,
    QUESTION,
    QWEN3,
    R1,
    STRICT,
    WEATHER,
    made_call,
)


@pytest.mark.parametrize("name", OWN)
@over("loop", LOOPS)
def test_a_tool_loop_is_rendered(name: str, loop: str) -> None:
    if name == "strict" and loop == "a system message":
        pytest.skip("it refuses system messages, which is its right")
    messages = LOOPS[loop]
    text = template_of(OWN[name][0]).render(messages, tools=WEATHER)
    cities = [city for city in ("Ulm", "Bonn", "Jena") if city in str(messages)]
    for city in cities:
        called, answered = text.find(f"{city}"), text.find(f"{city} is sunny")
        assert 0 <= called < answered, text  # both the call and its result
    assert text.count("is sunny") == len(cities)
    assert "weather" in text.partition("Weather?")[0] + text.partition("Weather?")[2]
    assert "None" not in text
    assert "null" not in text
    if loop == "text beside a call" and name not in ("python", "llama32", "nine"):
        assert "I shall look." in text  # these three drop it, as in training


@pytest.mark.parametrize("name", OWN)
def test_the_format_is_found(name: str) -> None:
    source, way = OWN[name]
    use = find_tool_use(template_of(source))
    assert use.format is way
    assert use.is_known is (name != "unknown")
    assert use.shows_tools is (name not in ("r1", "plain", "strict", "gemma3"))
    assert (use.warning is None) is (use.is_known and use.shows_tools)
    assert way.name in use.summary or not use.is_known
    assert (use.warning or "").isascii()
    named = find_tool_use(template_of(source), "pythonic")
    assert (named.format, named.is_known) == (PYTHONIC, True)
    assert "--tool-parser" in named.summary


def test_tools_are_shown_by_whichever_variable() -> None:
    for name, (source, _) in OWN.items():
        text = template_of(source).render([QUESTION], tools=WEATHER)
        assert "weather" in text, name
        assert "weather" not in template_of(source).render([QUESTION]), name


def test_an_instruction_stands_where_there_is_a_place() -> None:
    system = {"role": "system", "content": "Be kind."}
    for source, begins in ((PLAIN, "<system>Be kind.\n\nYou can call"), (R1, "<system>Be kind.")):
        assert template_of(source).render([system, QUESTION], tools=WEATHER).startswith(begins)
    text = template_of(PLAIN).render([QUESTION], tools=WEATHER)
    assert text.startswith("<system>You can call")
    assert '<tool_call>\n{"name": "NAME", "arguments": {"ARGUMENT": "VALUE"}}\n</tool_call>' in text
    text = template_of(STRICT).render([QUESTION], tools=WEATHER)
    assert text.startswith("<user>You can call")
    assert text.endswith("\n\nWeather?<assistant>")
    assert "<｜tool▁sep｜>NAME" in template_of(R1).render([QUESTION], tools=WEATHER)


def test_a_null_beside_calls_is_empty_text_or_null() -> None:
    messages = LOOPS["one turn"]
    assert "<assistant><tool_call>" in template_of(QWEN3).render(messages, tools=WEATHER)
    assert "<assistant><tool_call>" in template_of(NULL_IS_PRINTED).render(messages, tools=WEATHER)
    assert 'weather\n```json\n{"city": "Ulm"}\n```' in template_of(R1).render(
        messages, tools=WEATHER
    )
    style = template_of(R1).abilities.calls
    assert style is not None
    assert (style.content, style.arguments_are_text, style.takes_content) == (None, True, False)


def test_where_a_template_shows_one_or_the_other_two_messages_show_both() -> None:
    text = template_of(R1).render(LOOPS["text beside a call"], tools=WEATHER)
    assert text.index("<assistant>I shall look.") < text.index("weather\n```json")


def test_calls_one_at_a_time_have_their_results_behind_them() -> None:
    messages = LOOPS["two calls at once"]
    text = template_of(OWN["llama32"][0]).render(messages, tools=WEATHER)
    places = [text.index(f'"city": "{city}"') for city in ("Ulm", "Bonn")]
    results = [text.index(f"{city} is sunny") for city in ("Ulm", "Bonn")]
    assert places[0] < results[0] < places[1] < results[1]
    reordered = [*messages[:2], messages[3], messages[2]]
    assert template_of(OWN["llama32"][0]).render(reordered, tools=WEATHER) == text


def test_ids_of_nine_characters() -> None:
    text = template_of(NINE).render(LOOPS["two calls at once"], tools=WEATHER)
    first, second = (short_id(made_call(i, "x")["id"]) for i in (0, 1))
    assert first != second
    assert len(first) == 9
    assert f"[TOOL_RESULTS]{first}:Ulm" in text
    assert f"[TOOL_RESULTS]{second}:Bonn" in text
    assert short_id("abcDEF123") == "abcDEF123"


def test_results_as_text_of_the_user() -> None:
    messages = [*LOOPS["two calls at once"], {"role": "user", "content": "And?"}]
    text = template_of(STRICT).render(messages, tools=WEATHER)
    assert "<user><tool_response>\nUlm is sunny\n</tool_response>\n<tool_response>\nBonn" in text
    assert text.endswith("</tool_response>\nAnd?<assistant>")


def test_content_in_parts_where_a_template_shows_nothing_else() -> None:
    source = LOOP + "<{{ m.role }}>{% for p in m.content %}{{ p.text }}{% endfor %}" + END
    assert template_of(source).render([QUESTION]) == "<user>Weather?<assistant>"
    text = template_of(source).render(LOOPS["one turn"], tools=WEATHER)
    assert 0 <= text.find('"city": "Ulm"') < text.find("Ulm is sunny")


def test_a_result_behind_a_message_without_text() -> None:
    call = {"function": {"name": "weather"}}
    for content in ({}, {"content": [{"type": "text", "text": "a"}]}):
        messages: list[Any] = [
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "user", **content},
            {"role": "tool", "content": "sunny"},
        ]
        source = LOOP + "<{{ m.role }}>{{ m.content if m.role != 'tool' }}" + END
        assert "<tool_response>\nsunny" in template_of(source).render(messages)


def test_results_have_the_name_of_their_function() -> None:
    source = LOOP + "{{ m.name }}:{{ m.content }}" + HERMES_CALLS + "{% endfor %}"
    assert "weather:Ulm is sunny" in template_of(source).render(LOOPS["one turn"])


def test_arguments_may_be_text_or_an_object() -> None:
    as_text = made_call(0, "Ulm")
    as_text["function"]["arguments"] = json.dumps(as_text["function"]["arguments"])
    other: list[Any] = [
        QUESTION,
        {"role": "assistant", "tool_calls": [as_text]},
        LOOPS["one turn"][2],
    ]
    for source, _ in OWN.values():
        one = template_of(source)
        shown = [
            one.render(each, tools=WEATHER, datetime="now") for each in (LOOPS["one turn"], other)
        ]
        assert shown[0] == shown[1]


def without_time(prompt: str) -> str:
    return re.sub(r"\d\d:\d\d:\d\d", "", prompt)  # one template says what time it is


@over("history", BAD_HISTORIES)
@pytest.mark.parametrize("name", OWN)
def test_calls_and_results_that_do_not_belong_together(name: str, history: str) -> None:
    """Nothing is refused or lost, and a further turn changes nothing before it."""
    found = template_of(OWN[name][0])
    messages = BAD_HISTORIES[history]
    for tools in (None, WEATHER):
        prompt = without_time(found.render(messages, tools=tools))
        assert problem(prompt, messages) is None, prompt
    for i, message in enumerate(messages):
        if message["role"] == "user" and i:
            shorter = found.render(messages[:i], tools=WEATHER, add_generation_prompt=False)
            before = without_time(shorter)
            words = [each["content"] for each in messages[:i] if each["content"]]
            size = before.rindex(words[-1]) + len(words[-1])
            assert prompt[:size] == before[:size]


@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize("ids", [([1], {}), (5, 6.5), (True, "c2")])
def test_ids_are_text_whatever_they_are(name: str, ids: tuple[Any, Any]) -> None:
    shown = template_of(OWN[name][0])
    odd, plain = (
        [USER, _with_ids(calls("c1", "c2"), given), result(1), result(2), MORE]
        for given in (ids, tuple(map(str, ids)))
    )
    assert without_time(shown.render(odd)) == without_time(shown.render(plain))


def _with_ids(message: dict[str, Any], ids: tuple[Any, ...]) -> dict[str, Any]:
    made = [{**call, "id": ids[i]} for i, call in enumerate(message["tool_calls"])]
    return {**message, "tool_calls": made}


@pytest.mark.parametrize("content", [{}, {"content": None}])
def test_a_message_of_the_user_without_content_adds_nothing(content: dict[str, Any]) -> None:
    first = {"role": "user", **content}
    assert template_of(STRICT).render([first, MORE]) == template_of(STRICT).render([MORE])


@pytest.mark.parametrize("tools", [5, {}, "tools", [5], [[]], [None]])
def test_tools_of_the_wrong_shape(tools: Any) -> None:
    with pytest.raises(RequestError, match="tools must be a list of objects"):
        template_of(PLAIN).render([QUESTION], tools=tools)


@pytest.mark.parametrize("parameters", [True, 5, [], "x", {"properties": 5}])
def test_a_schema_that_is_no_object_stands_for_anything(parameters: Any) -> None:
    tool = {"type": "function", "function": {"name": "weather", "parameters": parameters}}
    for source, _ in OWN.values():
        assert "weather" in template_of(source).render([QUESTION], tools=[tool])
