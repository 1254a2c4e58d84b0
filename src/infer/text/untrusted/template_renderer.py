"""`TemplateRenderer`: compiles a chat template with Jinja and renders it, as transformers does."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Mapping
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError, UndefinedError
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node, Scope
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

Rendered = dict[str, Any]
"""`{"text": the prompt}`, `{"problem": a sentence}`, or `{"exceeds": a limit of the process}`."""

_TOO_LARGE: Rendered = {"exceeds": "memory"}
CANNOT = "the model's chat template cannot render these messages"
"""Beginning of the sentence about a rendering that has failed."""


class _TemplateRefusal(TemplateError):
    """The template called `raise_exception` with a message for the caller."""


class _GenerationTag(Extension):
    """`{% generation %}…{% endgeneration %}` marks training text; here it renders its body."""

    tags = frozenset({"generation"})  # type: ignore[assignment]  # read only

    def parse(self, parser: Parser) -> Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return Scope(body).set_lineno(lineno)


class _Namespace(Namespace):
    """A namespace without names that begin with an underscore; such names have broken sandboxes."""

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise SecurityError(f"a namespace cannot hold {name!r}")
        super().__setitem__(name, value)


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


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals.update(
        namespace=_Namespace, raise_exception=_raise_exception, strftime_now=_strftime_now
    )
    del environment.globals["lipsum"]  # random text
    return environment


class TemplateRenderer:
    """The template runs in Jinja's immutable sandbox, which keeps it from the interpreter, but
    limits neither time nor memory. So it runs in a process that the system limits
    (`text.untrusted.worker`), unless its text is known. Only plain values go in, and only a text or
    a sentence comes out."""

    def __init__(self, source: str) -> None:
        """`ValueError` with the reason, if the template does not compile."""
        try:
            self._template = _environment().from_string(source)
        except (TemplateError, RecursionError, SyntaxError, ValueError) as error:
            line = f"line {error.lineno}: " if isinstance(error, TemplateSyntaxError) else ""
            raise ValueError(f"{line}{getattr(error, 'message', None) or error}") from None

    def render(self, variables: Mapping[str, Any], max_chars: int) -> Rendered:
        """Render the template, to at most `max_chars` characters."""
        try:
            return self._rendered(variables, max_chars)
        except MemoryError as error:
            error.__traceback__ = None
            return _TOO_LARGE
        except Exception as error:
            # Jinja's traceback leads to frames that hold the error: a cycle, which would keep what
            # all callers have until the next full garbage collection.
            error.__traceback__ = None
            if isinstance(error, _TemplateRefusal):
                return {"problem": str(error)}
            # The messages of these errors name a field or an operation of the template. They do
            # not reveal anything of the server.
            if isinstance(error, (UndefinedError, SecurityError, TypeError)):
                return {"problem": f"{CANNOT}: {error}"}
            kind = type(error).__name__
            return {"problem": f"{CANNOT} ({kind}); check their roles, order and fields"}

    def _rendered(self, variables: Mapping[str, Any], max_chars: int) -> Rendered:
        pieces: list[str] = []
        num_chars = 0
        for piece in self._template.generate(variables):
            num_chars += len(piece)
            if num_chars > max_chars:
                return {"exceeds": "chars"}
            pieces.append(piece)
        return {"text": "".join(pieces)}


def prepare(source: str) -> tuple[Rendered, Callable[[Any], Rendered]]:
    """(what is wrong with a template, its work for `text.untrusted.worker`)."""
    try:
        renderer = TemplateRenderer(source)
    except ValueError as error:
        return {"problem": str(error)}, lambda _: {}
    except MemoryError:
        return _TOO_LARGE, lambda _: {}
    return {}, lambda value: renderer.render(*value)
