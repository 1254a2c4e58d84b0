"""Marks of answers where the chat template shows none: by architecture and `response_template`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from infer.text.answer_marks import ARCHITECTURES, marks_of_architecture
from infer.text.answer_parser import parser_for
from infer.text.checkpoint_text import read_text_files
from infer.text.tokenizer import Tokenizer
from tests.support.checkpoints import write_tokenizer
from tests.support.tool_conversations import OWN

SILENT = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|{{ m.role }}|>"
    "{{ m.content }}{% endfor %}"
)
"""Shows tools, and renders neither calls nor reasoning."""
CALLS_IN_JSON = {"open": "<call>", "close": "</call>", "content": "json", "repeats": True}


def tokenizer(folder: Path, template: str = SILENT, **files: dict[str, Any]) -> Tokenizer:
    write_tokenizer(folder)
    for name, changes in files.items():
        path = folder / f"{name}.json"
        known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        path.write_text(json.dumps(known | changes), encoding="utf-8")
    return Tokenizer(replace(read_text_files(folder), templates={"default": template}))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_an_architecture_has_known_marks(name: str) -> None:
    marks = marks_of_architecture(name)
    calls, thoughts = ARCHITECTURES[name]
    assert marks.calls is not None
    assert marks.calls.name == calls
    assert (marks.thoughts.name if marks.thoughts else "none") == thoughts


@pytest.mark.parametrize("spelled", ["gpt_oss", "gpt-oss", "GptOss"])
def test_an_architecture_is_known_however_it_is_spelled(spelled: str, tmp_path: Path) -> None:
    found = tokenizer(tmp_path, config={"model_type": spelled})
    assert found.tool_use is not None
    assert found.tool_use.format.name == "harmony"
    assert (found.tool_use.is_known, found.tool_use.warning) == (True, None)
    assert "architecture" in found.tool_use.summary
    assert found.thoughts is not None
    assert found.thoughts.name == "harmony"


def test_what_the_template_renders_comes_first(tmp_path: Path) -> None:
    config = {"model_type": "gpt_oss"}
    found = tokenizer(tmp_path, OWN["qwen25"][0], config=config).tool_use
    assert found is not None
    assert found.format.name == "hermes"
    unknown = tokenizer(tmp_path, OWN["unknown"][0], config=config).tool_use
    assert unknown is not None  # it writes calls, and not as its architecture did
    assert not unknown.is_known


@pytest.mark.parametrize(
    ("fields", "thoughts", "calls"),
    [
        ({"thinking": {"open": "<think>\n", "close": "</think>"}}, "think", None),
        (
            {"reasoning": {"open_pattern": r"\[THINK\]\s*", "close_pattern": r"\[/THINK\]"}},
            "mistral", None,
        ),
        ({"thinking": {"open": "<hm>", "close": "</hm>"}}, "response_template", None),
        ({"tool_calls": {"open": "<tool_call>", "close": "</tool_call>"}}, None, "hermes"),
        ({"tool_calls": CALLS_IN_JSON}, None, "json-between-marks"),
        ({"tool_calls": {**CALLS_IN_JSON, "content": "xml-inline"}}, None, None),
        ({"thinking": {"open_pattern": "<a|b>", "close": "</a>"}, "tool_calls": 3}, None, None),
        ({"thinking": {"open": 3}}, None, None),
        ([], None, None),
    ],
    ids=str,
)  # fmt: skip
def test_a_response_template_is_the_last_source(
    tmp_path: Path, fields: Any, thoughts: str | None, calls: str | None
) -> None:
    config = {"response_template": {"version": 1, "fields": fields}}
    found = tokenizer(tmp_path, tokenizer_config=config)
    assert (found.thoughts.name if found.thoughts else None) == thoughts
    assert found.tool_use is not None
    assert (found.tool_use.format.name if found.tool_use.is_known else None) == calls
    assert ("response_template" in found.tool_use.summary) is (calls is not None)


def test_calls_between_marks_of_a_response_template_are_read(tmp_path: Path) -> None:
    fields = {
        "thinking": {"open": "<hm>", "close": "</hm>"},
        "tool_calls": CALLS_IN_JSON,
    }
    found = tokenizer(tmp_path, tokenizer_config={"response_template": {"fields": fields}})
    assert found.tool_use is not None
    text = '<hm>So</hm>I look.<call>{"name": "f", "arguments": {"a": 1}}</call>'
    parser = parser_for(found.thoughts, found.tool_use.format, prompt_end="")
    parts = [parser.push(char) for char in text] + [parser.push("", end=True)]
    assert "".join(part.reasoning for part in parts) == "So"
    assert "".join(part.content for part in parts) == "I look."
    assert [call.name for part in parts for call in part.calls] == ["f"]
    said = [call.arguments for part in parts for call in part.calls] + [p.more for p in parts]
    assert "".join(said) == '{"a": 1}'
