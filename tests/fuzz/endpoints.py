"""HTTP requests to every endpoint, as hypothesis makes them: `calls()`.

Routes and bodies come from the OpenAPI document, so a new endpoint is tried as soon as it is there.
A body is one that the document allows (`allowed`), one of those with a few members changed, or
nothing that anybody should send. `python tests/fuzz/run.py` sends them for an hour.
"""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any
from urllib.parse import quote

from hypothesis import strategies as st

from infer.server.app import create_app
from infer.server.openai.openapi import document
from infer.server.route_table import EVENTS_PATH
from infer.server.settings import ServerSettings
from tests.fuzz.call import MODEL, Call
from tests.support.doubles import make_hash_llm

Schema = dict[str, Any]

MAX_TOKENS = 8
WORDS = ["", "a", "\x00", "\u2028", "😀", "<|end|>", "<tool_call>", "x" * 300, "{}", "é" * 9]
TEXTS = st.text(max_size=12) | st.sampled_from(WORDS)
NUMBERS = st.sampled_from([0, -1, 1, 2, 8, 9, 20, 256, 2**31, 2**63, -(2**63), 10**19])
FLOATS = st.floats(allow_nan=False, allow_infinity=False) | st.sampled_from([0.0, 1e-5, 1.0, 1e308])
SCALARS = st.one_of(st.none(), st.booleans(), NUMBERS, FLOATS, TEXTS)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
SMALL: dict[str, st.SearchStrategy[Any]] = {
    "model": st.sampled_from([None, MODEL]),
    "max_tokens": st.integers(0, MAX_TOKENS),
    "max_completion_tokens": st.none(),
    "n": st.integers(1, 3),
    "timeout": st.none() | st.just(5.0),
}
"""What would otherwise make nearly every body a refusal, or a long answer."""
RAW = st.one_of(
    st.binary(max_size=60),
    st.sampled_from(
        [
            b"",
            b"{",
            b"[]",
            b"null",
            b'{"prompt": NaN}',
            b'{"prompt": "\\ud800"}',
            b'{"a": 1, "a": 2}',
            b"\xef\xbb\xbf{}",
            b"[" * 5000,
            b'{"prompt": ' + b"9" * 5000 + b"}",
            b'{"prompt": 1e400}',
        ]
    ),
)
HEADERS: dict[str, list[str]] = {
    "Content-Type": [
        "application/json",
        "application/json; charset=latin-1",
        "text/plain",
        "multipart/form-data; boundary=x",
        "application/json, text/plain",
    ],
    "Authorization": ["Bearer ", "Bearer sk-wrong", "Basic YTpi", "Bearer a b", "sk-wrong"],
    "X-Request-Id": ["mine", "a" * 200, "a b", "../..", "<script>"],
    "Content-Encoding": ["gzip", "identity", "br, gzip"],
    "Accept": ["text/event-stream", "*/*", "image/png"],
    "Traceparent": ["00-" + "a" * 32 + "-" + "b" * 16 + "-01", "x"],
    "Origin": ["http://evil.example", "null"],
}
METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS", "TRACE", "X")
IDS = TEXTS | st.sampled_from(
    ["cmpl-", "sess-" + "0" * 32, MODEL, "..", "a/b", "%00", "x" * 900, "' or 1=1 --"]
)


@cache
def the_document() -> dict[str, Any]:
    """Of a server with keys and sessions."""
    app = create_app(make_hash_llm(), ServerSettings(sessions="sqlite://"))
    return document(app.routes, has_keys=True)


def allowed(schema: Schema) -> st.SearchStrategy[Any]:
    """Values that a schema of the document allows."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return st.deferred(lambda: allowed(the_document()["components"]["schemas"][name]))
    if "anyOf" in schema:
        return st.one_of(*map(allowed, schema["anyOf"]))
    if "const" in schema:
        return st.just(schema["const"])
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    match schema.get("type"):
        case "object":
            return _objects(schema)
        case "array":
            most = min(3, schema.get("maxItems", 3))
            least = schema.get("minItems", 0)
            return st.lists(allowed(schema.get("items", {})), min_size=least, max_size=most)
        case "string":
            shortest, longest = schema.get("minLength", 0), schema.get("maxLength", 400)
            texts = TEXTS.filter(lambda text: shortest <= len(text) <= longest)
            if "pattern" in schema:
                texts = texts.filter(lambda text: re.search(schema["pattern"], text) is not None)
            return texts
        case "boolean":
            return st.booleans()
        case "null":
            return st.none()
        case "integer":
            low, high = schema.get("minimum", -(2**63)), schema.get("maximum", 2**63)
            few = st.sampled_from([i for i in (0, 1, 2, low, high) if low <= i <= high])
            return few | st.integers(low, high)
        case "number":
            low = schema.get("exclusiveMinimum", schema.get("minimum", -1e9))
            high = schema.get("maximum", 1e9)
            return st.floats(low, high, exclude_min="exclusiveMinimum" in schema)
    return VALUES


def _objects(schema: Schema) -> st.SearchStrategy[dict[str, Any]]:
    fields = {name: allowed(field) for name, field in schema.get("properties", {}).items()}
    if not fields:
        inner = schema.get("additionalProperties", {})
        values = allowed(inner) if isinstance(inner, dict) else VALUES
        names = TEXTS if "propertyNames" not in schema else st.integers(0, 300).map(str)
        return st.dictionaries(names, values, max_size=3)
    fields |= {name: values for name, values in SMALL.items() if name in fields}
    required = {name: fields[name] for name in schema.get("required", ())}

    @st.composite
    def some(draw: st.DrawFn) -> dict[str, Any]:
        """With few of the fields that may be left out: of many together one is always refused."""
        names = draw(st.lists(st.sampled_from(sorted(fields)), max_size=4, unique=True))
        small = [name for name in ("max_tokens",) if name in fields]
        return {name: draw(fields[name]) for name in dict.fromkeys([*required, *small, *names])}

    return some()


@st.composite
def _changed(draw: st.DrawFn, bodies: st.SearchStrategy[Any]) -> Any:
    """A body with one to three members changed, added or taken away."""
    body = draw(bodies)
    if not isinstance(body, dict):
        return body
    for _ in range(draw(st.integers(1, 3))):
        name = draw(st.sampled_from([*body, "stream", "stop", "messages"]) | TEXTS)
        if draw(st.booleans()):
            body[name] = draw(VALUES)
        else:
            body.pop(name, None)
    return body


@st.composite
def calls(draw: st.DrawFn) -> Call:
    """One request to the server."""
    paths = the_document()["paths"]
    path = draw(st.sampled_from(sorted(paths.keys() - {EVENTS_PATH})))  # that has no end
    method = draw(st.sampled_from(sorted(paths[path])))
    operation = paths[path][method]
    if draw(st.integers(0, 19)) == 0:
        method = draw(st.sampled_from(METHODS))
    for name in ("id", "name"):
        path = path.replace(f"{{{name}}}", quote(draw(IDS), safe=""))
    if draw(st.integers(0, 19)) == 0:
        path += draw(st.sampled_from(["/", "/x", "?model=x", f"?model={MODEL}", "?%00", "//"]))
    headers = {}
    if draw(st.integers(0, 3)) == 0:
        for name in draw(st.lists(st.sampled_from(sorted(HEADERS)), max_size=3, unique=True)):
            headers[name] = draw(st.sampled_from(HEADERS[name]))
    body: Any = b""
    if "requestBody" in operation or draw(st.integers(0, 9)) == 0:
        body = draw(_bodies_of(operation))
    return Call(method.upper(), path, body, headers)


def _bodies_of(operation: dict[str, Any]) -> st.SearchStrategy[Any]:
    contents = operation.get("requestBody", {}).get("content", {}).values()
    schemas = [schema for content in contents for schema in content["schema"]["anyOf"]]
    if not schemas:
        return VALUES | RAW
    right = st.one_of(*map(allowed, schemas))
    return st.one_of(right, right, _changed(right), VALUES.filter(_is_json), RAW)


def _is_json(value: Any) -> bool:
    return len(json.dumps(value)) > 0
