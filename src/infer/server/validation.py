"""Pydantic's findings in our words: one `RequestError` that names the field and what was expected.

Only the first finding is told. Errors that our own validators raised pass unchanged, except that
they get the place where they happened; values sent by the client are not repeated. Called by
`routes`.
"""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from infer.errors import RequestError, UnprocessableError

W = TypeVar("W", bound=BaseModel)

_EXPECTED = {
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "a string",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
}
_RANGE = ("greater_than", "less_than", "too_long", "too_short")
_KINDS = {
    bool: "a boolean",
    int: "an integer",
    float: "a number",
    str: "a string",
    list: "a list",
    dict: "an object",
    type(None): "null",
}


def read(model: type[W], body: dict[str, Any]) -> W:
    """`body` as a `model`; raises `RequestError` (400) or `UnprocessableError` (422)."""
    try:
        return model.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise _explain(first) from None


def _explain(finding: Any) -> RequestError:
    kind: str = finding["type"]
    param = _path(finding["loc"])
    own = finding.get("ctx", {}).get("error")
    if isinstance(own, RequestError):
        inner = "." + own.param if own.param and param else own.param or ""
        return type(own)(own.message, param=(param + inner) or None, code=own.code)
    if kind == "missing":
        return RequestError(f"{param} is required", param=param, code="missing_required_parameter")
    if kind == "literal_error" and isinstance(finding["input"], str):
        expected = finding["ctx"]["expected"]
        return UnprocessableError(f"{param} must be {expected}", param=param)
    if kind.startswith(_RANGE):
        ctx = finding["ctx"]
        limits = {"ge": "at least", "le": "at most"}
        shown = [f"{words} {ctx[key]}" for key, words in limits.items() if key in ctx]
        if "max_length" in ctx:
            shown = [f"a list of at most {ctx['max_length']}"]
        return UnprocessableError(f"{param} must be {' and '.join(shown)}", param=param)
    sent = _KINDS.get(type(finding["input"]), "something else")
    expected = _EXPECTED.get(kind, "a string" if kind == "literal_error" else "of another type")
    return RequestError(f"{param} must be {expected}, not {sent}", param=param, code="invalid_type")


def _path(loc: tuple[str | int, ...]) -> str:
    """messages, 0, content → `messages[0].content`"""
    path = ""
    for step in loc:
        if isinstance(step, int):
            path += f"[{step}]"
        else:
            path += f".{step}" if path else step
    return path
