"""Renders a checkpoint's Jinja chat template, in the environment transformers gives it.

Templates come with checkpoints, so they run in Jinja's immutable sandbox: no files, no time but
`strftime_now`, limited ranges, repetitions and output. A template that does not compile is a
`LoadError`; whatever goes wrong while rendering is the messages' fault, a `RequestError`. Messages
are checked to be plain JSON, so that a template meets no object with methods. Used by `Tokenizer`,
which also keeps control tokens out of messages; this module knows no tokens.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.exceptions
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox
import jinja2.utils

from infer.errors import LoadError, RequestError
from infer.text.control_text import free_noncharacters

MAX_RENDERED_CHARS = 16_000_000
"""of a whole prompt; longer than any context, short enough not to hurt"""
MAX_RANGE = 10_000
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
_RESERVED = ("messages", "tools", "add_generation_prompt", "continue_final_message")


class _TemplateRefusal(jinja2.TemplateError):
    """The template called `raise_exception`; its message is meant for the caller."""


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks training text; here it renders its body."""

    tags = frozenset({"generation"})  # type: ignore[assignment]  # read only

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_render_body")
        return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(lineno)

    def _render_body(self, caller: jinja2.runtime.Macro) -> str:
        return str(caller())


class _PlainNamespace(jinja2.utils.Namespace):
    """A namespace without underscore names, through which sandboxes have been left before."""

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a namespace cannot hold {name!r}")
        super().__setitem__(name, value)


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"*", "**"})

    def call_binop(
        self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any
    ) -> Any:
        """Refuses products that would take memory or time out of proportion."""
        if operator == "**":
            if abs(left) > 10_000 or abs(right) > 100:
                raise jinja2.exceptions.SecurityError("the template computes a number too large")
        else:
            for many, count in ((left, right), (right, left)):
                if (
                    isinstance(many, (str, list, tuple))
                    and isinstance(count, int)
                    and len(many) * count > MAX_RENDERED_CHARS
                ):
                    raise jinja2.exceptions.SecurityError("the template repeats a value too often")
        return super().call_binop(context, operator, left, right)


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
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


def _limited_range(*bounds: int) -> range:
    numbers = range(*bounds)
    if len(numbers) > MAX_RANGE:
        raise jinja2.exceptions.SecurityError(f"the template loops more than {MAX_RANGE} times")
    return numbers


def _environment() -> _Environment:
    environment = _Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationTag, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = _tojson
    del environment.globals["lipsum"]  # random text of any length
    environment.globals.update(
        raise_exception=_raise_exception,
        strftime_now=_strftime_now,
        range=_limited_range,
        namespace=_PlainNamespace,
    )
    return environment


class ChatTemplate:
    """One compiled template together with the special tokens it may name (`bos_token`, …)."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self.source = source
        self._special_tokens = dict(special_tokens)
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise LoadError(
                f"the chat template does not compile: line {error.lineno}: {error.message}"
            ) from None
        except (jinja2.TemplateError, RecursionError) as error:
            raise LoadError(f"the chat template does not compile: {error}") from None
        self.accepts_parts = self._probe_parts()
        """whether a message's content may be a list of parts; if not, text parts are joined"""

    def render(
        self,
        /,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **extra: Any,
    ) -> str:
        """The prompt as text. `extra` are further variables of the template.

        Entries of a message that are None count as absent. With `continue_final_message` the text
        ends where the last message's content ends. Raises `RequestError` for anything the template
        refuses or cannot render, with `param="messages"`.
        """
        if continue_final_message and add_generation_prompt:
            raise RequestError(
                "continue_final_message continues the last message and add_generation_prompt"
                " starts a new one; use one of them",
                param="continue_final_message",
            )
        for name in extra:
            if name in _RESERVED or name.startswith("_") or name in ("raise_exception", "range"):
                raise RequestError(
                    f"{name!r} cannot be set as a variable of the chat template",
                    param="chat_template_kwargs",
                )
        turns = [self._prepared(index, message) for index, message in enumerate(messages)]
        if not turns:
            raise RequestError("messages is empty: send at least one message", param="messages")
        mark = ""
        if continue_final_message:
            (mark,) = free_noncharacters([turns, tools, extra, self.source], 1)
            _tag_final(turns[-1], mark)
        text = self._run(
            {
                "documents": None,
                **self._special_tokens,
                **{name: _plain(value, name) for name, value in extra.items()},
                "messages": turns,
                # An empty list means no tools in the API; templates test for `none`.
                "tools": _plain(tools, "tools") if tools else None,
                "add_generation_prompt": add_generation_prompt,
            }
        )
        return _cut_at(text, mark) if mark else text

    def _prepared(self, index: int, message: Any) -> dict[str, Any]:
        where = f"messages[{index}]"
        if not isinstance(message, Mapping):
            raise RequestError(
                f"{where} must be an object with `role` and `content`,"
                f" not {type(message).__name__}",
                param="messages",
            )
        present = {key: value for key, value in message.items() if value is not None}
        turn: dict[str, Any] = _plain(present, where)
        if not isinstance(turn.get("role"), str):
            raise RequestError(f"{where} has no `role` (a string)", param="messages")
        # Templates read the reasoning of earlier turns under either of two names.
        for name in _REASONING_FIELDS:
            if name in turn:
                turn = {"thinking": turn[name], **turn, "reasoning_content": turn[name]}
                break
        content = turn.get("content")
        # What a tool gives back may be a list of anything; templates write it out as JSON.
        is_data = turn["role"] in ("tool", "ipython") and not _are_text_parts(content)
        if isinstance(content, list) and not self.accepts_parts and not is_data:
            turn["content"] = _joined_parts(content, where)
        return turn

    def _run(self, variables: dict[str, Any]) -> str:
        pieces: list[str] = []
        size = 0
        try:
            for piece in self._template.generate(variables):
                size += len(piece)
                if size > MAX_RENDERED_CHARS:
                    raise _TemplateRefusal(
                        f"the prompt is longer than {MAX_RENDERED_CHARS} characters"
                    )
                pieces.append(piece)
        except _TemplateRefusal as error:
            raise RequestError(str(error), param="messages") from None
        except (jinja2.UndefinedError, jinja2.exceptions.SecurityError, TypeError) as error:
            # These name a field or an operation of the template, nothing of the server.
            raise RequestError(
                f"the model's chat template cannot render these messages: {error}",
                param="messages",
            ) from None
        except Exception as error:
            raise RequestError(
                "the model's chat template cannot render these messages"
                f" ({type(error).__name__}); check their roles, order and fields",
                param="messages",
            ) from None
        return "".join(pieces)

    def _probe_parts(self) -> bool:
        """Renders one message with a list as content, and looks whether the list was read."""
        part = {"type": "text", "text": "probe-of-parts"}
        variables = {
            **self._special_tokens,
            "messages": [{"role": "user", "content": [part]}],
            "tools": None,
            "documents": None,
            "add_generation_prompt": True,
        }
        try:
            text = self._run(variables)
        except RequestError:
            return False
        written_out = "'text'" in text or '"text"' in text  # the list itself, as Python or JSON
        return part["text"] in text and not written_out


def _plain(value: Any, where: str) -> Any:
    """A copy made of JSON's types only, exactly these and no subclasses."""
    try:
        return _copied(value, where)
    except RecursionError:
        raise RequestError(f"{where} is nested too deeply", param="messages") from None


def _copied(value: Any, where: str) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if type(value) in (str, int, float):
        return value
    if isinstance(value, str):  # enumerations and the like: the string they are
        return str.__str__(value)
    if isinstance(value, (int, float)):
        return value.__int__() if isinstance(value, int) else value.__float__()
    if isinstance(value, Mapping):
        return {_copied(key, where): _copied(item, where) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_copied(item, where) for item in value]
    raise RequestError(
        f"{where} contains a {type(value).__name__}; only JSON values can be rendered",
        param="messages",
    )


def _are_text_parts(content: Any) -> bool:
    return isinstance(content, list) and all(
        isinstance(part, dict) and part.get("type") == "text" for part in content
    )


def _joined_parts(parts: list[Any], where: str) -> str:
    texts = []
    for part in parts:
        text = part.get("text") if isinstance(part, dict) else part
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise RequestError(
                f"{where}.content has a part of type {kind!r}; this model reads text parts only",
                param="messages",
            )
        texts.append(text)
    return "\n".join(texts)


def _tag_final(turn: dict[str, Any], mark: str) -> None:
    """Puts the mark and a space behind the content.

    The space tells afterwards whether the template trims: then it is gone.
    """
    content = turn.get("content")
    if isinstance(content, str):
        turn["content"] = content + mark + " "
        return
    for part in reversed(content or []):
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            part["text"] += mark + " "
            return
    raise RequestError(
        "continue_final_message needs a last message with text to continue", param="messages"
    )


def _cut_at(text: str, mark: str) -> str:
    end = text.rfind(mark)
    if end < 0:
        raise RequestError(
            "the model's chat template leaves out the last message, so it cannot be continued",
            param="messages",
        )
    kept = text[:end]
    return kept if text[end + 1 : end + 2] == " " else kept.rstrip()
