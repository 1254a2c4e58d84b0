"""`ToolUse`: how one model gets tools and writes calls, and how that was determined."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from infer.text.chat_template import ChatTemplate
from infer.text.template_probes import Abilities
from infer.text.tools.formats import (
    BARE,
    FORMATS,
    GENERIC,
    ToolFormat,
    format_marked_in,
    format_named,
    format_with_token,
)

ARCHITECTURE = "by the model's architecture"
RESPONSE_TEMPLATE = "as response_template in tokenizer_config.json says"
"""Sources of a format beside the chat template."""


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The support of tools by one model.

    The operator names the format (`--tool-parser`), or the chat template renders calls in it, or
    the template has its mark, or its architecture is known, or the checkpoint has a
    `response_template` (`text.answer_marks`). If the template renders no tools, an instruction
    describes them. `Tokenizer` has a `ToolUse`, and the server reports it to clients.
    """

    format: ToolFormat
    """Format of calls that answers are searched for."""
    is_known: bool
    """Whether it is known that the model writes calls in this format."""
    shows_tools: bool
    """Whether the template renders tools; if not, an instruction describes them."""
    summary: str
    """Summary for the log at the start."""

    @property
    def warning(self) -> str | None:
        """A warning for clients whose requests have tools, one line of ASCII; None if none."""
        if not self.shows_tools:
            return (
                "the chat template of this model renders no tools: an instruction describes them,"
                f" and calls are expected in the format {self.format.name}"
            )
        if not self.is_known:
            return (
                "the format in which this model writes tool calls is not known: calls may be"
                " returned as content; the operator can name the format with --tool-parser"
            )
        return None


def find_tool_use(
    template: ChatTemplate,
    parser: str | None = None,
    tokens: Collection[str] = (),
    others: Mapping[str, ToolFormat | None] = MappingProxyType({}),
) -> ToolUse:
    """The support of tools by the model of a chat template.

    `parser`: the name of the format, if the operator has given it; `KeyError` if it is unknown.
    `tokens`: the tokens that were added to the vocabulary. `others`: formats that further sources
    name, by what they are called.
    """
    abilities = template.abilities
    shows = abilities.tools_variable is not None
    way, how = _format_of(template, abilities, parser, tokens)
    if not how:
        # A template that writes calls in an unknown format is none that its architecture had.
        named = ((form, source) for source, form in others.items() if form is not None)
        usable = (pair for pair in named if abilities.calls is None or pair[1] != ARCHITECTURE)
        way, how = next(usable, (way, how))
    known = ", ".join(form.name for form in FORMATS)
    if not shows:
        reason = "the chat template renders no tools, so an instruction describes them"
        how = f"{reason}; {way.name}, {how}"
    elif not how:
        how = f"the chat template writes calls in none of the known formats ({known}):"
        how += " they stay content, unless they are plain JSON; name the format with --tool-parser"
        return ToolUse(way, False, True, f"tool calls: {how}")
    else:
        how = f"{way.name}, {how}"
    return ToolUse(way, True, shows, f"tool calls: {how}")


def _format_of(
    template: ChatTemplate, abilities: Abilities, parser: str | None, tokens: Collection[str]
) -> tuple[ToolFormat, str]:
    """(format, how it was found; "": it was not found)"""
    if parser is not None:
        return format_named(parser), "named by --tool-parser"
    if abilities.format is not None:
        return abilities.format, "as the chat template writes them"
    if abilities.calls is None and (marked := format_marked_in(template.source)):
        return marked, "by a mark in the chat template"
    if abilities.tools_variable is None:
        return GENERIC, "as the instruction says"
    if marked := format_with_token(tokens):
        return marked, "by a token of the vocabulary"
    return BARE, ""
