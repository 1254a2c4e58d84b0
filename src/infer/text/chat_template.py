"""`ChatTemplate`: renders a checkpoint's Jinja chat template as transformers does.

Templates come with checkpoints and are not trusted, so they run in Jinja's immutable sandbox. They
have no access to files, no clock except `strftime_now`, and limits on ranges, repetitions and
output. A template that does not compile is a `LoadError`. An error in rendering is attributed to
the messages and is a `RequestError`. Messages are copied as plain JSON, so a template gets no
object with methods. `Tokenizer` uses this module and also keeps control tokens out of messages;
this module knows no tokens.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError, UndefinedError
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node, Scope
from jinja2.parser import Parser

from infer.errors import LoadError, RequestError
from infer.text.control_text import free_noncharacters, strings_in
from infer.text.sandbox import MAX_RENDERED_CHARS, BoundedEnvironment, WorkError
from infer.text.system_messages import with_one_system
from infer.text.template_probes import find_abilities
from infer.text.tools.formats import ToolFormat
from infer.text.tools.tool_messages import adapted

MAX_UNITS, UNITS_PER_CHAR = 20_000_000, 256
"""Maximum units of work of a rendering: a base, and an addition per character of the input.

Published templates need 2 to 20 units per character. The whole base takes seconds of CPU time and
250 MB.
"""
MAX_RENDER_S = 10.0
"""Maximum CPU time of a rendering, in seconds."""
MAX_PROBE_S = 1.0
"""Maximum CPU time, in seconds, of each probe with which a template is tried at the start."""
MAX_TEMPLATE_CHARS = 2_000_000
"""Maximum length of a template's source in characters; the longest published one has 20,000."""
_WORD = re.compile(r"[A-Za-z_]\w*")


class _TemplateRefusal(TemplateError):
    """The template called `raise_exception` with a message for the caller."""


class _GenerationTag(Extension):
    """`{% generation %}…{% endgeneration %}` marks training text; here it renders its body."""

    tags = frozenset({"generation"})  # type: ignore[assignment]  # read only

    def parse(self, parser: Parser) -> Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return Scope(body).set_lineno(lineno)


def _raise_exception(message: str) -> None:
    raise _TemplateRefusal(str(message))


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes <, > and & for HTML, which would change the prompt.
    options: dict[str, Any] = {"ensure_ascii": ensure_ascii, "sort_keys": sort_keys}
    return json.dumps(value, indent=indent, separators=separators, **options)


def _environment() -> BoundedEnvironment:
    environment = BoundedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.add_filter("tojson", _tojson)
    environment.globals.update(
        raise_exception=_raise_exception,
        strftime_now=_strftime_now,
    )
    return environment


def _strftime_now(pattern: str) -> str:
    if len(pattern) > 100:
        raise WorkError("the template gives strftime_now more than 100 characters")
    return datetime.datetime.now().strftime(pattern)


def _refusal(message: str) -> RequestError:
    return RequestError(message, param="messages")


class ChatTemplate:
    """A compiled chat template with the special tokens that it may use (`bos_token`, …)."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """`special_tokens`: text of each token by the name of its variable.

        `LoadError` if the template is too long, does not compile, or takes too much work.
        """
        self.source = source
        self._special_tokens = dict(special_tokens)
        self._words = frozenset(_WORD.findall(source))
        """All identifiers in the source, which include the variables that it reads."""
        if len(source) > MAX_TEMPLATE_CHARS:
            raise LoadError(
                f"the chat template has {len(source):,} characters; at most"
                f" {MAX_TEMPLATE_CHARS:,} are taken"
            )
        self._environment = _environment()
        try:
            with self._environment.limited(MAX_UNITS, MAX_PROBE_S):  # constants are folded
                self._template = self._environment.from_string(source)
        except (TemplateError, RecursionError, SyntaxError, ValueError) as error:
            line = f"line {error.lineno}: " if isinstance(error, TemplateSyntaxError) else ""
            problem = getattr(error, "message", None) or error
            raise LoadError(f"the chat template does not compile: {line}{problem}") from None
        self.abilities = find_abilities(self._render_probe, self._words)
        """What the template supports (tools, parts, …), as probes have found out."""

    def _render_probe(self, messages: Sequence[dict[str, Any]], variables: dict[str, Any]) -> str:
        fixed = {"messages": list(messages), "add_generation_prompt": False}
        try:
            return self._rendered(
                {**self._common_variables(), "tools": None, **variables, **fixed},
                MAX_UNITS,
                MAX_PROBE_S,
            )
        except WorkError as error:
            raise LoadError(
                f"the chat template cannot be used, not even for a few words: {error}"
            ) from None

    def _common_variables(self) -> dict[str, Any]:
        """The variables that are the same for every prompt."""
        common: dict[str, Any] = {"documents": None, **self._special_tokens}
        if "datetime" in self._words:  # Firefunction's template needs it; clients do not send it
            common["datetime"] = datetime.datetime.now().strftime("%B %d %Y %H:%M:%S")
        return common

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tool_format: ToolFormat | None = None,
        /,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **extra: Any,
    ) -> str:
        """The prompt as text. `extra`: further variables of the template.

        Entries of a message that are None count as absent. The role "developer" is a newer name of
        "system". Where the template takes one system message, those at the beginning are joined.
        Tools, calls and results are given to the template in the form that it supports.
        `tool_format` is the format of calls that the template does not render itself; the default
        is the template's own format or else a generic one. With `continue_final_message` the text
        ends where the last message's content ends. Raises `RequestError` with `param="messages"`
        for anything that the template refuses or cannot render.
        """
        if continue_final_message and add_generation_prompt:
            raise RequestError(
                "continue_final_message continues the last message and add_generation_prompt"
                " starts a new one; use one of them",
                param="continue_final_message",
            )
        for name in extra:
            if name in ("raise_exception", "range") or name.startswith("_"):
                problem = f"{name!r} cannot be set as a variable of the chat template"
                raise RequestError(problem, param="chat_template_kwargs")
        turns = [self._prepared(f"messages[{i}]", message) for i, message in enumerate(messages)]
        if not turns:
            raise _refusal("messages is empty: send at least one message")
        if not self.abilities.takes_several_systems:
            turns = with_one_system(turns)
        way = tool_format or self.abilities.format
        turns, shown = adapted(turns, _plain(tools, "tools"), self.abilities, way)
        mark = ""
        if continue_final_message:
            (mark,) = free_noncharacters([turns, tools, extra, self.source], 1)
            _tag_final(turns[-1], mark)
        variables = self._common_variables() | {
            name: _plain(value, name) for name, value in extra.items()
        }
        variables |= {"messages": turns, "add_generation_prompt": add_generation_prompt, **shown}
        text = self._run(variables)
        return _cut_at(text, mark) if mark else text

    def _prepared(self, where: str, message: Any) -> dict[str, Any]:
        if not isinstance(message, Mapping):
            kind = type(message).__name__
            raise _refusal(f"{where} must be an object with `role` and `content`, not {kind}")
        turn: dict[str, Any] = _plain(
            {key: value for key, value in message.items() if value is not None}, where
        )
        if not isinstance(turn.get("role"), str):
            raise _refusal(f"{where} has no `role` (a string)")
        if turn["role"] == "developer":
            turn["role"] = "system"
        # Templates read the reasoning of earlier turns as `thinking` or as `reasoning_content`.
        for name in ("reasoning_content", "thinking", "reasoning"):
            if name in turn:
                turn = {"thinking": turn[name], **turn, "reasoning_content": turn[name]}
                break
        content = turn.get("content")
        if isinstance(content, list) and not self.abilities.takes_parts:
            only_text = all(_kind_of(part) == "text" for part in content)
            # A tool's result may be a list of anything, which templates render as JSON.
            if only_text or turn["role"] not in ("tool", "ipython"):
                turn["content"] = "\n".join(_text_of(part, where) for part in content)
        return turn

    def _run(self, variables: dict[str, Any]) -> str:
        size = sum(map(len, strings_in(variables)))
        try:
            return self._rendered(variables, MAX_UNITS + UNITS_PER_CHAR * size, MAX_RENDER_S)
        except WorkError as error:
            problem = "the model's chat template cannot render these messages"
            raise _refusal(f"{problem}: {error}") from None

    def _rendered(self, variables: dict[str, Any], units: float, cpu_s: float) -> str:
        pieces: list[str] = []
        size = 0
        try:
            with self._environment.limited(units, cpu_s):
                for piece in self._template.generate(variables):
                    size += len(piece)
                    if size > MAX_RENDERED_CHARS:
                        _raise_exception(
                            f"the prompt is longer than {MAX_RENDERED_CHARS} characters"
                        )
                    self._environment.spend(1 + len(piece))
                    pieces.append(piece)
        except Exception as error:
            # Jinja's traceback leads to frames that hold the error: a cycle, which would keep what
            # all callers have until the next full garbage collection.
            error.__traceback__ = None
            if isinstance(error, WorkError):
                raise
            if isinstance(error, _TemplateRefusal):
                raise _refusal(str(error)) from None
            reason = f" ({type(error).__name__}); check their roles, order and fields"
            # The messages of these errors name a field or an operation of the template. They do
            # not reveal anything of the server.
            if isinstance(error, (UndefinedError, SecurityError, TypeError)):
                reason = f": {error}"
            raise _refusal(
                f"the model's chat template cannot render these messages{reason}"
            ) from None
        return "".join(pieces)


def _plain(value: Any, where: str) -> Any:
    """A copy that consists of JSON's types only, without subclasses.

    `RequestError` if `value`, which the message calls `where`, has other types or is too deep.
    """
    if value is None or isinstance(value, bool):
        return value
    try:
        if isinstance(value, str):  # also an enumeration whose members are strings
            return str.__str__(value)
        if isinstance(value, int):
            return int.__int__(value)
        if isinstance(value, float):
            return float.__float__(value)
        if isinstance(value, Mapping):
            return {_plain(key, where): _plain(item, where) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [_plain(item, where) for item in value]
    except RecursionError:
        raise _refusal(f"{where} is nested too deeply") from None
    raise _refusal(f"{where} contains a {type(value).__name__}; only JSON values can be rendered")


def _kind_of(part: Any) -> Any:
    return part.get("type") if isinstance(part, dict) else type(part).__name__


def _text_of(part: Any, where: str) -> str:
    text = part.get("text") if isinstance(part, dict) else part
    if not isinstance(text, str):
        kind = _kind_of(part)
        raise _refusal(
            f"{where}.content has a part of type {kind!r}; this model reads text parts only"
        )
    return text


def _tag_final(turn: dict[str, Any], mark: str) -> None:
    """Append the mark and a space to the content of the last message, in place.

    The space is missing from the prompt if the template strips white space from contents.
    """
    content = turn.get("content")
    if isinstance(content, str):
        turn["content"] = content + mark + " "
        return
    for part in reversed(content if isinstance(content, list) else []):
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            part["text"] += mark + " "
            return
    raise _refusal("continue_final_message needs a last message with text to continue")


def _cut_at(text: str, mark: str) -> str:
    """The text before the mark of `_tag_final`."""
    kept, found, rest = text.rpartition(mark)
    if not found:
        raise _refusal(
            "the model's chat template leaves out the last message, so it cannot be continued"
        )
    return kept if rest.startswith(" ") else kept.rstrip()
