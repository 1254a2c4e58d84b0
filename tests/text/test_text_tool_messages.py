"""Tests of tool loops with templates that differ: what the probes find, and what is rendered.

The templates are our own. Each has one peculiarity of published templates, which are themselves
tested in `test_text_published_templates.py`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from infer.text.chat_template import ChatTemplate
from infer.text.template_probes import short_id
from infer.text.tools.formats import (
    BARE,
    DEEPSEEK,
    FUNCTIONARY_32,
    FUNCTOOLS,
    GENERIC,
    HERMES,
    MISTRAL,
    PYTHONIC,
)
from infer.text.tools.tool_use import find_tool_use

TEMPLATES = Path(__file__).parents[1] / "support" / "templates"
LOOP = "{% for m in messages %}"
END = "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}"
HERMES_CALLS = (
    '{% for c in m.tool_calls or [] %}<tool_call>\n{"name": "{{ c.function.name }}",'
    ' "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
)
QWEN3 = (  # searches the content for reasoning
    TOOLS + LOOP + "<{{ m.role }}>{{ m.content.split('</think>')[-1] }}" + HERMES_CALLS + END
)
R1 = (  # renders calls if the content is null, and concatenates their arguments; no tools
    LOOP + "{% if m.role == 'assistant' and m.content is none %}{% for c in m.tool_calls %}"
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{{ c.type + '<｜tool▁sep｜>' + c.function.name +"
    " '\\n```json\\n' + c.function.arguments + '\\n```' }}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    "{% endfor %}{% else %}{{ '<' + m.role + '>' + m.content }}{% endif %}" + END
)
SECTIONS = (  # functionary's: arguments as text, tools with descriptions
    "{% for t in tools or [] %}{{ t.function.description + t.function.name }}"
    "{% for p in t.function.parameters.properties %}{{ p }}{% endfor %}{% endfor %}"
    + LOOP
    + "|{{ m.role }}|{% if m.content %}>>>all\n{{ m.content }}{% endif %}"
    "{% for c in m.tool_calls or [] %}{{ '>>>' + c.function.name + '\\n' + c.function.arguments }}"
    "{% endfor %}" + END + "{% if add_generation_prompt %}>>>{% endif %}"
)
NINE = (  # Mistral's: ids have nine characters
    TOOLS + LOOP + "{% if m.tool_calls %}{% for c in m.tool_calls %}{% if c.id|length != 9 %}"
    "{{ raise_exception('nine!') }}{% endif %}{% endfor %}[TOOL_CALLS][{% for c in m.tool_calls %}"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
    "{{ ', ' if not loop.last }}{% endfor %}]{% elif m.role == 'tool' %}"
    "{% if m.tool_call_id|length != 9 %}{{ raise_exception('nine!') }}{% endif %}[TOOL_RESULTS]"
    "{{ m.tool_call_id }}:{{ m.content }}{% else %}<{{ m.role }}>{{ m.content }}{% endif %}" + END
)
XML_TOOLS = (  # SmolLM3's: another variable, calls only in the content
    "{% if xml_tools %}Call as <tool_call>. {% for t in xml_tools %}{{ t }}{% endfor %}{% endif %}"
    + LOOP
    + "<{{ m.role }}>{{ m.content }}"
    + END
)
FUNCTIONS = (  # Firefunction's: tools as text, and a date
    "{{ functions + ' today is ' + datetime }}" + LOOP + "<{{ m.role }}>{{ m.content }}"
    "{% if m.tool_calls %} functools[{% for c in m.tool_calls %}"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
    "{{ ', ' if not loop.last }}{% endfor %}]{% endif %}" + END
)
PYTHON = (
    TOOLS + LOOP + "<{{ m.role }}>{% if m.tool_calls %}[{% for c in m.tool_calls %}"
    "{{ c.function.name }}({% for k, v in c.function.arguments | items %}{{ k }}={{ v | tojson }}"
    "{{ ', ' if not loop.last }}{% endfor %}){{ ', ' if not loop.last }}{% endfor %}]"
    "{% else %}{{ m.content }}{% endif %}" + END
)
UNKNOWN = TOOLS + LOOP + "<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}%%{{ c.function.name }}%{{ c.function.arguments | tojson }}{% endfor %}" + END  # fmt: skip  # noqa: E501
NULL_IS_PRINTED = TOOLS + LOOP + "<{{ m.role }}>{{ m.content }}" + HERMES_CALLS + END
PLAIN = LOOP + "<{{ m.role }}>{{ m.content }}" + END
STRICT = (  # no system messages and no tools; roles must alternate
    LOOP + "{% if m.role not in ('user', 'assistant') or (m.role == 'user') != (loop.index0 % 2 =="
    " 0) %}{{ raise_exception('alternate!') }}{% endif %}<{{ m.role }}>{{ m.content }}" + END
)
OWN = {
    "qwen3": (QWEN3, HERMES),
    "r1": (R1, DEEPSEEK),
    "sections": (SECTIONS, FUNCTIONARY_32),
    "nine": (NINE, MISTRAL),
    "xml_tools": (XML_TOOLS, HERMES),
    "functions": (FUNCTIONS, FUNCTOOLS),
    "python": (PYTHON, PYTHONIC),
    "unknown": (UNKNOWN, BARE),
    "null is printed": (NULL_IS_PRINTED, HERMES),
    "plain": (PLAIN, GENERIC),
    "strict": (STRICT, GENERIC),
    "llama32": ((TEMPLATES / "llama32.jinja").read_text(), BARE),
    "qwen25": ((TEMPLATES / "qwen25.jinja").read_text(), HERMES),
    "gemma3": ((TEMPLATES / "gemma3.jinja").read_text(), GENERIC),
}
FUNCTION = {"name": "weather", "parameters": {"type": "object", "properties": {"city": {}}}}
WEATHER: list[dict[str, Any]] = [{"type": "function", "function": FUNCTION}]


def made_call(number: int, city: str) -> dict[str, Any]:
    """A call as a client sends it back."""
    arguments = {"city": city}
    return {
        "id": f"call_0123456789abcdef0123456789abcdef_0_{number}",
        "type": "function",
        "function": {"name": "weather", "arguments": arguments},
    }


def asked(*cities: str, content: str | None = None, first: int = 0) -> list[dict[str, Any]]:
    """An answer with calls, and the messages with their results."""
    made = [made_call(first + i, city) for i, city in enumerate(cities)]
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": f"{city} is sunny"}
        for call, city in zip(made, cities, strict=True)
    ]
    return [{"role": "assistant", "content": content, "tool_calls": made}, *results]


QUESTION = {"role": "user", "content": "Weather?"}
LOOPS: dict[str, list[dict[str, Any]]] = {
    "one turn": [QUESTION, *asked("Ulm")],
    "three turns": [
        QUESTION,
        *asked("Ulm"),
        *asked("Bonn", first=1),
        {"role": "assistant", "content": "Sunny there."},
        {"role": "user", "content": "And here?"},
        *asked("Jena", first=2),
    ],
    "two calls at once": [QUESTION, *asked("Ulm", "Bonn")],
    "text beside a call": [QUESTION, *asked("Ulm", content="I shall look.")],
    "a system message": [{"role": "system", "content": "Be kind."}, QUESTION, *asked("Ulm")],
}


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"})


@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize("loop", LOOPS)
def test_a_tool_loop_is_rendered(name: str, loop: str) -> None:
    if name == "strict" and loop == "a system message":
        pytest.skip("it refuses system messages, which is its right")
    messages = LOOPS[loop]
    text = template(OWN[name][0]).render(messages, tools=WEATHER)
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
    use = find_tool_use(template(source))
    assert use.format is way
    assert use.is_known is (name != "unknown")
    assert use.shows_tools is (name not in ("r1", "plain", "strict", "gemma3"))
    assert (use.warning is None) is (use.is_known and use.shows_tools)
    assert way.name in use.summary or not use.is_known
    assert (use.warning or "").isascii()
    named = find_tool_use(template(source), "pythonic")
    assert (named.format, named.is_known) == (PYTHONIC, True)
    assert "--tool-parser" in named.summary


def test_tools_are_shown_by_whichever_variable() -> None:
    for name, (source, _) in OWN.items():
        text = template(source).render([QUESTION], tools=WEATHER)
        assert "weather" in text, name
        assert "weather" not in template(source).render([QUESTION]), name


def test_an_instruction_stands_where_there_is_a_place() -> None:
    system = {"role": "system", "content": "Be kind."}
    for source, begins in ((PLAIN, "<system>Be kind.\n\nYou can call"), (R1, "<system>Be kind.")):
        assert template(source).render([system, QUESTION], tools=WEATHER).startswith(begins)
    text = template(PLAIN).render([QUESTION], tools=WEATHER)
    assert text.startswith("<system>You can call")
    assert '<tool_call>\n{"name": "NAME", "arguments": {"ARGUMENT": "VALUE"}}\n</tool_call>' in text
    text = template(STRICT).render([QUESTION], tools=WEATHER)
    assert text.startswith("<user>You can call")
    assert text.endswith("\n\nWeather?<assistant>")
    assert "<｜tool▁sep｜>NAME" in template(R1).render([QUESTION], tools=WEATHER)


def test_a_null_beside_calls_is_empty_text_or_null() -> None:
    messages = LOOPS["one turn"]
    assert "<assistant><tool_call>" in template(QWEN3).render(messages, tools=WEATHER)
    assert "<assistant><tool_call>" in template(NULL_IS_PRINTED).render(messages, tools=WEATHER)
    assert 'weather\n```json\n{"city": "Ulm"}\n```' in template(R1).render(messages, tools=WEATHER)
    style = template(R1).abilities.calls
    assert style is not None
    assert (style.content, style.arguments_are_text, style.takes_content) == (None, True, False)


def test_where_a_template_shows_one_or_the_other_two_messages_show_both() -> None:
    text = template(R1).render(LOOPS["text beside a call"], tools=WEATHER)
    assert text.index("<assistant>I shall look.") < text.index("weather\n```json")


def test_calls_one_at_a_time_have_their_results_behind_them() -> None:
    messages = LOOPS["two calls at once"]
    text = template(OWN["llama32"][0]).render(messages, tools=WEATHER)
    places = [text.index(f'"city": "{city}"') for city in ("Ulm", "Bonn")]
    results = [text.index(f"{city} is sunny") for city in ("Ulm", "Bonn")]
    assert places[0] < results[0] < places[1] < results[1]
    reordered = [*messages[:2], messages[3], messages[2]]
    assert template(OWN["llama32"][0]).render(reordered, tools=WEATHER) == text


def test_ids_of_nine_characters() -> None:
    text = template(NINE).render(LOOPS["two calls at once"], tools=WEATHER)
    first, second = (short_id(made_call(i, "x")["id"]) for i in (0, 1))
    assert first != second
    assert len(first) == 9
    assert f"[TOOL_RESULTS]{first}:Ulm" in text
    assert f"[TOOL_RESULTS]{second}:Bonn" in text
    assert short_id("abcDEF123") == "abcDEF123"


def test_results_as_text_of_the_user() -> None:
    messages = [*LOOPS["two calls at once"], {"role": "user", "content": "And?"}]
    text = template(STRICT).render(messages, tools=WEATHER)
    assert "<user><tool_response>\nUlm is sunny\n</tool_response>\n<tool_response>\nBonn" in text
    assert text.endswith("</tool_response>\nAnd?<assistant>")


def test_content_in_parts_where_a_template_shows_nothing_else() -> None:
    source = LOOP + "<{{ m.role }}>{% for p in m.content %}{{ p.text }}{% endfor %}" + END
    assert template(source).render([QUESTION]) == "<user>Weather?<assistant>"
    text = template(source).render(LOOPS["one turn"], tools=WEATHER)
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
        assert "<tool_response>\nsunny" in template(source).render(messages)


def test_results_have_the_name_of_their_function() -> None:
    source = LOOP + "{{ m.name }}:{{ m.content }}" + HERMES_CALLS + "{% endfor %}"
    assert "weather:Ulm is sunny" in template(source).render(LOOPS["one turn"])


def test_arguments_may_be_text_or_an_object() -> None:
    as_text = made_call(0, "Ulm")
    as_text["function"]["arguments"] = json.dumps(as_text["function"]["arguments"])
    other: list[Any] = [
        QUESTION,
        {"role": "assistant", "tool_calls": [as_text]},
        LOOPS["one turn"][2],
    ]
    for source, _ in OWN.values():
        shown = [
            template(source).render(each, tools=WEATHER) for each in (LOOPS["one turn"], other)
        ]
        assert shown[0] == shown[1]
