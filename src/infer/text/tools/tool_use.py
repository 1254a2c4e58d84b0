"""`ToolUse`: how one model is shown tools and writes calls, and how that was found out.

Either the operator has named the format (`--tool-parser`), or the chat template writes calls in it,
or its mark stands in the template. A template that shows no tools gets an instruction in their
place. Used by `Tokenizer`, which has one, and by the server, which says so to clients.
"""

from __future__ import annotations

from dataclasses import dataclass

from infer.text.chat_template import ChatTemplate
from infer.text.template_probes import Abilities
from infer.text.tools.formats import (
    BARE,
    FORMATS,
    GENERIC,
    ToolFormat,
    format_marked_in,
    format_named,
)


@dataclass(frozen=True, slots=True)
class ToolUse:
    """See the module's docstring."""

    format: ToolFormat
    """in which calls are looked for"""
    is_known: bool
    """whether it is known that the model writes calls in this format"""
    shows_tools: bool
    """whether the template shows the model tools; if not, it is given an instruction"""
    summary: str
    """for the log, at the start"""

    @property
    def warning(self) -> str | None:
        """What a client should know whose request has tools; ASCII, one line."""
        if not self.shows_tools:
            return (
                "the chat template of this model shows it no tools: they are described in an"
                f" instruction, and calls are expected as {self.format.name}"
            )
        if not self.is_known:
            return (
                "the format in which this model writes tool calls is not known: calls may come as"
                " content; the operator can name one with --tool-parser"
            )
        return None


def find_tool_use(template: ChatTemplate, parser: str | None = None) -> ToolUse:
    """`parser`: the name of a format that the operator says the model has."""
    abilities = template.abilities
    shows = abilities.tools_variable is not None
    way, how = _format_of(template, abilities, parser)
    known = ", ".join(each.name for each in FORMATS)
    if not shows:
        how = f"the chat template shows no tools: an instruction does, calls as {way.name} ({how})"
    elif not how:
        how = f"the chat template writes calls in none of the known formats ({known}):"
        how += " they stay content, unless they are plain JSON; name the format with --tool-parser"
        return ToolUse(way, False, True, f"tool calls: {how}")
    else:
        how = f"{way.name}, {how}"
    return ToolUse(way, True, shows, f"tool calls: {how}")


def _format_of(
    template: ChatTemplate, abilities: Abilities, parser: str | None
) -> tuple[ToolFormat, str]:
    """(the format, how it was found; "" = it was not)"""
    if parser is not None:
        return format_named(parser), "named by --tool-parser"
    if abilities.format is not None:
        return abilities.format, "as the chat template writes them"
    if abilities.calls is None and (marked := format_marked_in(template.source)):
        return marked, "by a mark in the chat template"
    if abilities.tools_variable is None:
        return GENERIC, "as the instruction says"
    return BARE, ""
