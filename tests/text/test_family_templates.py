"""What is found out about templates of the families of markup: format, reasoning, ids of calls."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from infer.text.chat_template import ChatTemplate
from infer.text.tools.formats import FORMATS, THOUGHTS, ToolFormat, format_with_token
from infer.text.tools.tool_use import find_tool_use
from tests.support.tool_conversations import END, LOOP, QUESTION, TOOLS, WEATHER, asked

THINKS = (
    "{% if m.role == 'assistant' and m.reasoning_content %}OPEN{{ m.reasoning_content }}CLOSE"
    "{% endif %}"
)
KIMI = (  # the id names the function
    TOOLS + LOOP + "<{{ m.role }}>{% if m.role == 'tool' %}{{ m.tool_call_id }}={% endif %}"
    "{{ m.content or '' }}{% if m.tool_calls %}<|tool_calls_section_begin|>"
    "{% for c in m.tool_calls %}<|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>"
    "{{ c.function.arguments | tojson }}<|tool_call_end|>{% endfor %}"
    "<|tool_calls_section_end|>{% endif %}" + END
)
TAGGED = {
    "qwen3-coder": "<tool_call>\n<function={{ c.function.name }}>\n"
    "{% for k, v in c.function.arguments | items %}<parameter={{ k }}>\n{{ v }}\n</parameter>\n"
    "{% endfor %}</function>\n</tool_call>",
    "seed-oss": "<seed:tool_call>\n<function={{ c.function.name }}>"
    "{% for k, v in c.function.arguments | items %}<parameter={{ k }}>{{ v }}</parameter>"
    "{% endfor %}</function>\n</seed:tool_call>",
    "glm": "<tool_call>{{ c.function.name }}\n{% for k, v in c.function.arguments | items %}"
    "<arg_key>{{ k }}</arg_key>\n<arg_value>{{ v }}</arg_value>\n{% endfor %}</tool_call>",
    "minimax-m2": '<minimax:tool_call>\n<invoke name="{{ c.function.name }}">'
    '{% for k, v in c.function.arguments | items %}<parameter name="{{ k }}">{{ v }}</parameter>'
    "{% endfor %}</invoke>\n</minimax:tool_call>",
    "harmony": "<|start|>assistant to=functions.{{ c.function.name }}<|channel|>commentary json"
    "<|message|>{{ c.function.arguments | tojson }}<|call|>",
    "lfm2": "<|tool_call_start|>[{{ c.function.name }}({% for k, v in c.function.arguments | items"
    " %}{{ k }}='{{ v }}'{% endfor %})]<|tool_call_end|>",
    "command-a": '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "{{ c.function.name }}",'
    ' "parameters": {{ c.function.arguments | tojson }}}]<|END_ACTION|>',
    "apertus": '<|tools_prefix|>[{"{{ c.function.name }}": {{ c.function.arguments | tojson }}}]'
    "<|tools_suffix|>",
    "llama4": '<|python_start|><|python_end|>{"name": "{{ c.function.name }}", "parameters":'
    " {{ c.function.arguments | tojson }}}",
}


@cache
def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, {})


def writing(call: str, thoughts: str = "") -> str:
    calls = f"{{% for c in m.tool_calls or [] %}}{call}{{% endfor %}}"
    return TOOLS + LOOP + "<{{ m.role }}>" + thoughts + "{{ m.content or '' }}" + calls + END


@pytest.mark.parametrize("name", TAGGED)
def test_the_format_is_that_in_which_the_template_writes(name: str) -> None:
    use = find_tool_use(template(writing(TAGGED[name])))
    assert (use.format.name, use.is_known, use.warning) == (name, True, None)


@pytest.mark.parametrize("thoughts", THOUGHTS, ids=lambda thoughts: thoughts.opening)
def test_the_marks_of_reasoning_are_those_of_the_rendering(thoughts: Any) -> None:
    shown = THINKS.replace("OPEN", thoughts.opening).replace("CLOSE", thoughts.closing)
    found = template(writing(TAGGED["glm"], shown) + "{# </think> [/THINK] #}").thoughts
    assert found == thoughts
    assert template(writing(TAGGED["glm"])).thoughts is None
    assert template(writing(TAGGED["glm"]) + "{# </think> #}").thoughts == THOUGHTS[0]


def test_ids_of_calls_are_numbered_through_where_the_template_names_functions_in_them() -> None:
    shown = template(KIMI)
    assert find_tool_use(shown).format.name == "kimi-k2"
    chat = [QUESTION, *asked("Ulm", "Bonn"), *asked("Jena", first=2)]
    text = shown.render(chat, tools=WEATHER)
    for i, city in enumerate(("Ulm", "Bonn", "Jena")):
        call = f'functions.weather:{i}<|tool_call_argument_begin|>{{"city": "{city}"}}'
        assert 0 < text.find(call) < text.find(f"<tool>functions.weather:{i}={city} is sunny")
    assert text.startswith(shown.render(chat[:4], tools=WEATHER, add_generation_prompt=False))


def test_a_token_of_the_vocabulary_names_the_format_of_a_template_that_does_not() -> None:
    silent = template(TOOLS + LOOP + "<{{ m.role }}>{{ m.content }}" + END)
    assert not find_tool_use(silent).is_known
    use = find_tool_use(silent, None, {"<|tool_call_start|>", "<|im_end|>"})
    assert (use.format.name, use.is_known) == ("lfm2", True)
    assert not find_tool_use(silent, None, {"<tool_call>"}).is_known  # of several formats
    assert find_tool_use(silent, "mistral", {"<|tool_call_start|>"}).format.name == "mistral"


@pytest.mark.parametrize("way", FORMATS, ids=lambda way: way.name)
def test_marks_of_one_format_are_known_by_their_tokens(way: ToolFormat) -> None:
    marks = [mark for each in FORMATS for mark in each.openings]
    own = [mark for mark in way.openings if marks.count(mark) == 1]
    assert format_with_token(own) is (way if own else None)
