"""Fields of a chat that turn reasoning on and off, in the name that its template reads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from infer.text.tokenizer import Tokenizer
from tests.support.doubles import make_hash_llm, small_text_files
from tests.support.serving import CHAT, ask, chat_body, check_refused

SOURCE = (
    "{% for m in messages %}{{ m.content }}{% endfor %}"
    "{% if thinking is defined %}[{{ thinking }}]{% endif %}"
)


def prompt(**fields: Any) -> Any:
    files = replace(small_text_files(), templates={"default": SOURCE})
    llm = make_hash_llm(tokenizer=Tokenizer(files))
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
