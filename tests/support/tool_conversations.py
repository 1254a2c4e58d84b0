"""Chat templates of many kinds, and conversations with tool calls for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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

TEMPLATES = Path(__file__).with_name("templates")


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
    "llama32": ((TEMPLATES / "llama32.jinja").read_text(encoding="utf-8"), BARE),
    "qwen25": ((TEMPLATES / "qwen25.jinja").read_text(encoding="utf-8"), HERMES),
    "gemma3": ((TEMPLATES / "gemma3.jinja").read_text(encoding="utf-8"), GENERIC),
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
