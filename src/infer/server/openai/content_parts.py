"""Content parts: the text of a content, which is a string or a list of parts

OpenAI's text parts have `type` and `text`. Clients add members of their own to them (marks for a
cache, annotations, ids) and send parts of newer kinds that are text all the same. Members without a
meaning here are left out and noted, or refused by a strict server, as unknown fields are. Parts
that are no text are refused; only the thoughts of an assistant may be left out, since templates
leave those of earlier turns out, too.
"""

from __future__ import annotations

from typing import Any

from infer.errors import RequestError, UnprocessableError
from infer.server.http.json_body import MAX_NAME_CHARS
from infer.server.openai.ignored_fields import note

_TEXTS = {"text": "text", "input_text": "text", "output_text": "text"}
"""Kind of a part → the member that has its text; the last two are OpenAI's newer names."""
_SAID = {"refusal": "refusal"}
"""Further kinds that an assistant's message may have."""
_THOUGHTS = frozenset(("thinking", "redacted_thinking", "reasoning"))
"""Kinds of an assistant's parts that hold what it thought."""
IMAGE = "[image: this model reads text only]"
FILE = "[file: this server reads text only]"
"""Texts in the place of an image or a file, in APIs whose clients cannot go on without them."""


def text_of(content: Any, role: str | None = None, noted: list[str] | None = None) -> str:
    """The texts of all parts, or of a string, as one. `role`: that of the message. Raises
    `RequestError` for what is neither, for parts of other kinds, and (422) for further members if
    `noted` is None; otherwise their names are noted in that list."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        raise RequestError("content must be a string or a list of text parts")
    texts = _TEXTS | _SAID if role == "assistant" else _TEXTS
    return "".join(_text(part, texts, role, noted) for part in content)


def _text(
    part: dict[str, Any], texts: dict[str, str], role: str | None, noted: list[str] | None
) -> str:
    kind = type_of(part)
    member = None if kind is None else texts.get(kind)
    if member is None:
        if noted is not None and role == "assistant" and kind in _THOUGHTS:
            note(noted, kind)
            return ""
        problem = f"content has a part with {shown_kind(kind)}"
        message = f"{problem}; only parts of the type 'text' are supported"
        raise RequestError(message, code="unsupported_content_part")
    text = part.get(member)
    if not isinstance(text, str):
        words = f"{{'type': '{kind}', '{member}': string}}"
        raise RequestError(f"a text part of content must be {words}")
    if len(part) > 2:
        leave_out(part, {"type", member}, "a text part", noted)
    return text


def type_of(value: Any) -> str | None:
    """The `type` of an object; None where it is no text, or where `value` is no object."""
    kind = value.get("type") if isinstance(value, dict) else None
    return kind if isinstance(kind, str) else None


def shown_kind(kind: Any) -> str:
    """The kind of a part or an item, for an error message."""
    return repr(kind[:MAX_NAME_CHARS]) if isinstance(kind, str) else "no type"


def leave_out_kind(kind: Any, path: str, owner: str, noted: list[str] | None) -> None:
    """Note the kind of a part that is left out. Raises `RequestError` if it has none, or if `noted`
    is None. `owner`: what the part is, for the message."""
    if isinstance(kind, str) and noted is not None:
        note(noted, kind)
        return
    message = f"{path} is {owner} with {shown_kind(kind)}, which this server does not know"
    raise RequestError(message, param=path, code="unsupported_content_part")


def member(fields: dict[str, Any], name: str, kind: type, path: str) -> Any:
    """A member that must be a string or an object. Raises `RequestError`; `path`: of `fields`."""
    value = fields.get(name)
    if not isinstance(value, kind):
        word = "a string" if kind is str else "an object"
        raise RequestError(f"{path}.{name} must be {word}", param=f"{path}.{name}")
    return value


def leave_out(fields: dict[str, Any], known: set[str], owner: str, noted: list[str] | None) -> None:
    """Note the names of `fields` beyond those that are known. Raises `UnprocessableError` if
    `noted` is None. `owner`: what the fields belong to, for the message. Null is absent."""
    for name, value in fields.items():
        if name in known or value is None:
            continue
        if noted is None:
            short = name[:MAX_NAME_CHARS]
            message = f"{owner} has no field {short!r}; known are {', '.join(sorted(known))}"
            raise UnprocessableError(message, param=short, code="unknown_parameter")
        note(noted, name)
