"""The marks of reasoning and calls of a model whose chat template does not show them

A template that renders neither is no source. Then the name of the architecture says what its
published models were trained to write, and else the `response_template` of tokenizer_config.json:
`fields`, each with the texts that open and close it. The operator's `--reasoning-parser` and
`--tool-parser` come first.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from infer.text.tools.formats import (
    THOUGHTS,
    Thoughts,
    ToolFormat,
    format_between,
    format_named,
    thoughts_named,
)


class AnswerMarks(NamedTuple):
    """The marks of an answer's parts, as far as a source says."""

    thoughts: Thoughts | None = None
    """Marks around the reasoning."""
    calls: ToolFormat | None = None
    """Format of calls."""


ARCHITECTURES: Mapping[str, tuple[str, str]] = {
    "apertus": ("apertus", "apertus"),
    "cohere2": ("command-a", "command-a"),
    "deepseek2": ("deepseek", "think"),
    "deepseekv3": ("deepseek", "think"),
    "deepseekv32": ("deepseek-v3.2", "think"),
    "deepseekv4": ("deepseek-v4", "think"),
    "ernie45moe": ("hermes", "think"),
    "gemma4": ("gemma4", "gemma4"),
    "glm4moe": ("glm", "think"),
    "gptoss": ("harmony", "harmony"),
    "hunyuanv1moe": ("hunyuan", "think"),
    "kimik2": ("kimi-k2", "think"),
    "lfm2": ("lfm2", "think"),
    "lfm2moe": ("lfm2", "think"),
    "llama4": ("llama4", "none"),
    "minimaxm2": ("minimax-m2", "think"),
    "mistral3": ("mistral", "mistral"),
    "nemotronh": ("qwen3-coder", "think"),
    "olmo3": ("olmo3", "think"),
    "qwen2": ("hermes", "none"),
    "qwen2moe": ("hermes", "none"),
    "qwen3": ("hermes", "think"),
    "qwen3moe": ("hermes", "think"),
    "qwen35": ("qwen3-coder", "think"),
    "qwen35moe": ("qwen3-coder", "think"),
    "seedoss": ("seed-oss", "seed-oss"),
    "smollm3": ("hermes", "think"),
}
"""Architecture, without signs → names of the format of calls and of the marks of reasoning."""
_THOUGHT_FIELDS = ("thinking", "reasoning_content", "reasoning")
_CALL_FIELDS = ("tool_calls", "tool_call")
_ESCAPED = re.compile(r"\\([^\w\s])")
_SPACE = re.compile(r"\\s[*+]|\\n[*+?]")
_SPECIAL = re.compile(r"[\\.^$*+?{}\[\]|()]")


def marks_of_architecture(architecture: str | None) -> AnswerMarks:
    """What models of an architecture write; `architecture`: as a config or a GGUF file names it."""
    plain = "".join(char for char in architecture or "" if char.isalnum()).lower()
    known = ARCHITECTURES.get(plain)
    if known is None:
        return AnswerMarks()
    return AnswerMarks(thoughts_named(known[1]), format_named(known[0]))


def marks_of_response_template(template: Mapping[str, Any]) -> AnswerMarks:
    """What a `response_template` says. A field that cannot be read says nothing."""
    fields = template.get("fields")
    if not isinstance(fields, dict):
        return AnswerMarks()
    thoughts = _first(fields, _THOUGHT_FIELDS)
    calls = _first(fields, _CALL_FIELDS)
    return AnswerMarks(
        _thoughts_between(*thoughts) if thoughts and all(thoughts) else None,
        format_between(*calls) if calls and _is_read(fields, *calls) else None,
    )


def _first(fields: Mapping[str, Any], names: tuple[str, ...]) -> tuple[str, str] | None:
    """(opening, closing) of the first of these fields that has an opening mark"""
    for name in names:
        field = fields.get(name)
        opening = _mark(field, "open")
        if opening:
            return opening, _mark(field, "close")
    return None


def _mark(field: Any, name: str) -> str:
    """The text of a field's mark without white space around it; "" if it has none, or a pattern
    that stands for several texts."""
    if not isinstance(field, dict):
        return ""
    text, pattern = field.get(name), field.get(f"{name}_pattern")
    if isinstance(text, str):
        return text.strip()
    if not isinstance(pattern, str):
        return ""
    bare = _SPACE.sub("", pattern)
    if _SPECIAL.search(_ESCAPED.sub("", bare)):
        return ""
    return _ESCAPED.sub(r"\1", bare).strip()


def _thoughts_between(opening: str, closing: str) -> Thoughts:
    known = (thoughts_known for thoughts_known in THOUGHTS if thoughts_known.closing == closing)
    thoughts = next(
        (thoughts_known for thoughts_known in known if thoughts_known.opening.strip() == opening),
        None,
    )
    return thoughts or Thoughts(opening, closing, name="response_template")


def _is_read(fields: Mapping[str, Any], opening: str, closing: str) -> bool:
    """Whether calls between these marks can be read: those of a known format, and JSON."""
    way = format_between(opening, closing)
    known: Any = next((fields[name] for name in _CALL_FIELDS if name in fields), {})
    return way.name != "json-between-marks" or "json" in json.dumps(known.get("content", "json"))
