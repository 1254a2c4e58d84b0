"""What a request says about reasoning, in the variables and values that a template reads."""

from __future__ import annotations

import re
from typing import Any

import pytest

from infer.text.chat_template import ChatTemplate
from infer.text.thinking_switches import switches

QWEN = "{% if enable_thinking is defined and enable_thinking is false %}"
DEEPSEEK = "{% if not thinking is defined %}{% set thinking = false %}{% endif %}"
GPT_OSS = '{% if reasoning_effort is not defined %}{% set reasoning_effort = "medium" %}{% endif %}'
HUNYUAN = "{% if reasoning_effort not in ['high', 'low', 'no_think'] %}{% endif %}"
COHERE = '{% if reasoning_effort | lower == "none" %}'
KIMI = "{% if thinking and thinking_effort not in ['low', 'high', 'max'] %}"
NEMOTRON = "{% if enable_thinking and low_effort %}"
SEED = "{% if thinking_budget == 0 %}"
MINIMAX = '{% if thinking_mode == "enabled" %}{% elif thinking_mode == "disabled" %}'
PRINTS = "{{ reasoning_effort }}"
ROWS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    (QWEN, {"enable_thinking": False}, {"enable_thinking": False}),
    (QWEN, {"thinking": False}, {"enable_thinking": False}),
    (QWEN, {"reasoning_effort": "none"}, {"enable_thinking": False}),
    (QWEN, {"reasoning_effort": "high"}, {"enable_thinking": True}),
    (DEEPSEEK, {"enable_thinking": True}, {"thinking": True}),
    (DEEPSEEK, {"reasoning_effort": "low"}, {"thinking": True}),
    (DEEPSEEK, {"reasoning_effort": "none"}, {"thinking": False}),
    (GPT_OSS, {"reasoning_effort": "high"}, {"reasoning_effort": "high"}),
    (GPT_OSS, {"reasoning_effort": "max"}, {"reasoning_effort": "high"}),
    (GPT_OSS, {"reasoning_effort": "none"}, {"reasoning_effort": "low"}),
    (HUNYUAN, {"enable_thinking": False}, {"reasoning_effort": "no_think"}),
    (HUNYUAN, {"reasoning_effort": "none"}, {"reasoning_effort": "no_think"}),
    (HUNYUAN, {"enable_thinking": True}, {"reasoning_effort": "high"}),
    (HUNYUAN, {"reasoning_effort": "medium"}, {"reasoning_effort": "high"}),
    (COHERE, {"enable_thinking": False}, {"reasoning_effort": "none"}),
    (KIMI, {"reasoning_effort": "xhigh"}, {"thinking": True, "thinking_effort": "max"}),
    (KIMI, {"enable_thinking": False}, {"thinking": False}),
    (NEMOTRON, {"reasoning_effort": "low"}, {"enable_thinking": True, "low_effort": True}),
    (NEMOTRON, {"reasoning_effort": "high"}, {"enable_thinking": True, "low_effort": False}),
    (SEED, {"enable_thinking": False}, {"thinking_budget": 0}),
    (MINIMAX, {"enable_thinking": False}, {"thinking_mode": "disabled"}),
    (PRINTS, {"reasoning_effort": "minimal"}, {"reasoning_effort": "minimal"}),
    (QWEN, {}, {}),
    (QWEN, {"custom": 1}, {"custom": 1}),
]


@pytest.mark.parametrize(("source", "given", "expected"), ROWS)
def test_a_template_gets_what_it_reads(
    source: str, given: dict[str, Any], expected: dict[str, Any]
) -> None:
    words = frozenset(re.findall(r"[A-Za-z_]\w*", source))
    made = switches(given, source, words)
    assert {name: made[name] for name in expected} == expected
    read = {name for name in made if name in words and name not in given}
    assert read <= expected.keys()


def test_what_is_given_for_the_template_itself_wins() -> None:
    words = {"enable_thinking", "thinking"}
    given = {"enable_thinking": False, "thinking": True, "reasoning_effort": "high"}
    assert switches(given, "", words) == given


def test_a_prompt_has_it() -> None:
    source = "{% for m in messages %}{{ m.content }}{% endfor %}[{{ thinking }}]"
    template = ChatTemplate(source, {})
    chat = [{"role": "user", "content": "Hi"}]
    assert template.render(chat, enable_thinking=True) == "Hi[True]"
    assert template.render(chat, reasoning_effort="none") == "Hi[False]"
    assert template.render(chat) == "Hi[]"
