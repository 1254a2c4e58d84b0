"""Numbers of calls go back into the prompt as the model has written them, whatever the template"""

from __future__ import annotations

import json
from typing import Any

import pytest

from infer.server.openai import schema_base
from infer.server.openai.chat import ChatBody, plain_messages
from infer.text.tools.written_numbers import has_own_form
from tests.support.ready_templates import template_of
from tests.support.tool_conversations import OWN

NUMBERS = ["1e5", "2.50", "-0", "-0.0", "1E+2", "0.10", "1.0e-7", "100000000000000000000.5"]
USUAL = ["1", "-3", "2.5", "1.0", "0", "12345678901234567890", "1e-07", "1e+16"]
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
STRINGS_APART = (  # a template that writes strings in a way of its own, as Gemma's does
    "{{ tools }}{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{% for k, v in "
    "c.function.arguments.items() %}{{ k }}:{% if v is string %}<|{{ v }}|>{% else %}{{ v }}"
    "{% endif %},{% endfor %}{% endfor %}{% endfor %}"
)


def prompt_of(source: str, arguments: str) -> str:
    """The prompt of a conversation with a call, as the server makes it."""
    call = {"id": "abcdefghi", "type": "function"}
    call["function"] = {"name": "weather", "arguments": arguments}  # type: ignore[assignment]
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "abcdefghi", "content": "y"},
    ]
    wire = schema_base.read(ChatBody, {"messages": messages, "tools": [TOOL]})
    return template_of(source).render(plain_messages(wire), tools=[TOOL])


@pytest.mark.parametrize("name", OWN)
def test_a_number_goes_back_as_it_was_written(name: str) -> None:
    """Alone, in lists and beside text that looks the same; in no template is the rest changed."""
    source, rest = OWN[name][0], '"text": "2.50 1e5", "more": '
    numbers = ", ".join(NUMBERS)
    written = f'{{"n": {NUMBERS[0]}, {rest}[{numbers}]}}'
    usual = f'{{"n": 100000.0, {rest}[{", ".join(json.dumps(json.loads(n)) for n in NUMBERS)}]}}'
    found, plain = prompt_of(source, written), prompt_of(source, usual)
    if numbers not in found:  # a template with a form of its own: nothing is worse than before
        assert found == plain
        return
    assert found.replace(numbers, "[…]").count("[…]") == 1
    assert "2.50 1e5" in found


def test_most_templates_write_them_back() -> None:
    written = '{"n": 2.50, "m": [1e5]}'
    back = [name for name in OWN if "1e5" in prompt_of(OWN[name][0], written)]
    assert len(back) > len(OWN) / 2


def test_the_text_of_a_call_is_the_models_own() -> None:
    for number in NUMBERS:
        arguments = f'{{"n": {number}}}'
        assert arguments in prompt_of(OWN["qwen3"][0], arguments)


def test_a_template_that_tells_strings_apart_gets_numbers() -> None:
    assert "n:2.5," in prompt_of(STRINGS_APART, '{"n": 2.50}')


@pytest.mark.parametrize("number", USUAL)
def test_usual_numbers_cost_nothing(number: str) -> None:
    assert not has_own_form(f'{{"n": [{number}, "2.50"]}}')


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "1" * 5000, '{"n": NaN}', "null"])
def test_what_is_no_call_is_left_alone(text: str) -> None:
    assert not has_own_form(text)
    prompt_of(OWN["qwen3"][0], text)


@pytest.mark.parametrize(
    "number", ["1e400", "-1e400", "1" * 5000, "1" * 400 + ".0", "0." + "1" * 400]
)
def test_huge_numbers_do_no_harm(number: str) -> None:
    assert "y" in prompt_of(OWN["qwen3"][0], f'{{"n": {number}, "m": 2.50}}')
