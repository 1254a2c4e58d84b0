"""Fields of a chat that turn reasoning on and off, in the name that its template reads."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from infer.text.tokenizer import Tokenizer
from tests.support.demo_answers import demo
from tests.support.doubles import LastingTokenizer, make_hash_llm
from tests.support.hash_engine import small_text_files
from tests.support.serving import CHAT, ask, chat_body, check_refused

SOURCE = (
    "{% for m in messages %}{{ m.content }}{% endfor %}"
    "{% if thinking is defined %}[{{ thinking }}]{% endif %}"
)


@functools.cache
def tokenizer() -> Tokenizer:
    return LastingTokenizer(replace(small_text_files(), templates={"default": SOURCE}))


def prompt(**fields: Any) -> Any:
    llm = make_hash_llm(tokenizer=tokenizer())
    return ask(llm, f"{CHAT}/render", chat_body(**fields))


@pytest.mark.parametrize(
    ("fields", "end"),
    [
        ({}, ""),
        ({"enable_thinking": True}, "[True]"),
        ({"enable_thinking": False}, "[False]"),
        ({"thinking": {"type": "enabled", "budget_tokens": 100}}, "[True]"),
        ({"thinking": {"type": "disabled"}}, "[False]"),
        ({"thinking": {"type": "adaptive"}}, ""),
        ({"thinking": {"type": "auto"}}, ""),
        ({"thinking": False}, "[False]"),
        ({"reasoning_effort": "none"}, "[False]"),
        ({"reasoning_effort": "low"}, "[True]"),
        ({"reasoning_effort": "low", "enable_thinking": False}, "[False]"),
        ({"enable_thinking": False, "chat_template_kwargs": {"thinking": True}}, "[True]"),
        ({"chat_template_kwargs": {"enable_thinking": True}}, "[True]"),
    ],
    ids=str,
)
def test_it_reaches_the_template(fields: dict[str, Any], end: str) -> None:
    reply = prompt(**fields)
    assert reply.status == 200, reply.body
    assert reply.json()["prompt"] == f"Hello{end}"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"thinking": {"type": "much"}}, "thinking"),
        ({"thinking": {}}, "thinking"),
        ({"thinking": "yes"}, "thinking"),
        ({"enable_thinking": "yes"}, "enable_thinking"),
    ],
    ids=str,
)
def test_other_values_are_refused(fields: dict[str, Any], param: str) -> None:
    reply = prompt(**fields)
    code = "invalid_type" if param == "enable_thinking" else None
    check_refused(reply, 400, param, code, "true")


BUDGET_TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>"
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|assistant|><think>\n{% endif %}"
)
BUDGET = 9
MESSAGES = [{"role": "user", "content": "Tell me a story."}]
BUDGETED: dict[str, list[dict[str, Any]]] = {
    CHAT: [
        {"messages": MESSAGES, "thinking_token_budget": BUDGET},
        {"messages": MESSAGES, "thinking": {"type": "enabled", "budget_tokens": BUDGET}},
    ],
    "/v1/messages": [
        {"messages": MESSAGES, "thinking": {"type": "enabled", "budget_tokens": BUDGET}},
    ],
    "/v1/responses": [
        {"input": MESSAGES, "reasoning": {"max_tokens": BUDGET}, "max_output_tokens": 40},
    ],
}


def thought_and_text(answer: Any) -> tuple[str, str, int]:
    """(reasoning, text, number of tokens of the reasoning, -1 where the API has no place for it)"""
    if "choices" in answer:
        message = answer["choices"][0]["message"]
        details = answer["usage"]["completion_tokens_details"]
        return message["reasoning_content"], message["content"], details["reasoning_tokens"]
    if "output" in answer:
        thought, said = answer["output"]
        details = answer["usage"]["output_tokens_details"]
        text = said["content"][0]["text"]
        return thought["content"][0]["text"], text, details["reasoning_tokens"]
    thought, said = answer["content"]
    return thought["thinking"], said["text"], -1


def test_a_budget_ends_the_reasoning_in_each_api(tmp_path: Path) -> None:
    file = tmp_path / "thinks.jinja"
    file.write_text(BUDGET_TEMPLATE, encoding="utf-8")
    seen = set()
    for path, bodies in BUDGETED.items():
        limit = {} if path == "/v1/responses" else {"max_tokens": 40}
        for answer in demo(path, *({**body, **limit} for body in bodies), chat_template=str(file)):
            thought, text, num = thought_and_text(answer)
            assert num in (BUDGET, -1)
            assert text
            seen.add((thought, text))
    assert len(seen) == 1


def test_a_stream_with_a_budget_is_the_whole_answer(tmp_path: Path) -> None:
    file = tmp_path / "thinks.jinja"
    file.write_text(BUDGET_TEMPLATE, encoding="utf-8")
    body = {"messages": MESSAGES, "max_tokens": 40, "thinking_token_budget": BUDGET}
    options = {"stream": True, "stream_options": {"include_usage": True}}
    plain, events = demo(CHAT, body, {**body, **options}, chat_template=str(file))
    deltas = [choice["delta"] for event in events for choice in event["choices"]]
    thought, text, num = thought_and_text(plain)
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == thought
    assert "".join(delta.get("content", "") for delta in deltas) == text
    assert events[-1]["usage"]["completion_tokens_details"]["reasoning_tokens"] == num == BUDGET


@pytest.mark.parametrize("budget", [-2, 1.5, "many", True, 2**60])
def test_no_budget(budget: Any) -> None:
    reply = prompt(thinking_token_budget=budget)
    assert reply.status in (400, 422)
    assert "thinking_token_budget" in reply.error()["message"]
