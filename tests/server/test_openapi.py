"""The OpenAPI document agrees with the server: fields, routes, methods, and (marked) schemathesis
against a server with the shipped model. `serving.App` checks that every status and media type which
any other test here gets is in the document."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.routing import Route

from infer.server.openai import ignored_fields
from infer.server.openai.schema_base import Wire
from infer.server.route_table import COMPARISONS_PATH, EVENTS_PATH
from infer.server.tenancy.keys import KeyLimits, Keys
from tests.support.doubles import make_hash_llm
from tests.support.serving import App, check_documented, code_at, with_app

METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE")
STARTS: tuple[dict[str, Any], ...] = (
    {"messages": [{"role": "user", "content": "x"}]},
    {"input": "x"},  # before a prompt, which is a field of responses that is refused
    {"prompt": "x"},
    {"tokens": [1]},
    {},
)


SCHEMATHESIS_SETTINGS = """
[checks.not_a_server_error]
expected-statuses = ["2xx", "3xx", "4xx", "504"]
"""
"""504 is a request's own deadline: the document allows any above 0 s."""


def the_document() -> Any:
    return with_app(make_hash_llm(), lambda app: app.get("/openapi.json")).json()


def wire_models(root: type[Wire] = Wire) -> Iterator[type[Wire]]:
    for model in root.__subclasses__():
        yield model
        yield from wire_models(model)


def bodies(document: Any) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Method, path and schema of each request body in the document."""
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            for content in operation.get("requestBody", {}).get("content", {}).values():
                for ref in content["schema"]["anyOf"]:
                    name = ref["$ref"].rpartition("/")[2]
                    yield method.upper(), path, document["components"]["schemas"][name]


def test_every_field_that_is_read_is_in_the_document_and_no_other(tmp_path: Path) -> None:
    document = the_document()
    names = {name for model in wire_models() for name in (*model.model_fields, *model.ignored)}
    names |= {name for _, _, schema in bodies(document) for name in schema["properties"]}
    names |= {"zzz", *ignored_fields.REQUEST_FIELDS}

    async def is_read(app: App, method: str, path: str, start: Any, name: str) -> bool:
        body = {**start, name: {"no field": ["has this"]}}
        if path == "/tokenize" and (name in ("messages", "prompt")) and name not in start:
            return False  # the field decides which of two bodies this is
        reply = await app.post(path.replace("{id}", "x"), body, method=method)
        assert reply.status != 500
        error = reply.error() if reply.status != 200 else {}
        is_ours = error.get("code") != code_at(path, "unknown_parameter")
        return is_ours or f"there is no field {name!r}" not in error.get("message", "")

    async def use(app: App) -> int:
        checked = 0
        for method, path, schema in bodies(document):
            start = next(start for start in STARTS if start.keys() <= schema["properties"].keys())
            for name in names:
                has = name in schema["properties"]
                assert await is_read(app, method, path, start, name) == has, (path, name)
                checked += 1
        return checked

    url = f"sqlite:///{tmp_path}/s.db"
    assert with_app(make_hash_llm(), use, sessions=url, unknown_params="refuse") > 500


def test_unknown_fields_are_in_the_document_as_the_server_takes_them() -> None:
    async def closed(app: App) -> set[str]:
        schemas = (await app.get("/openapi.json")).json()["components"]["schemas"]
        return {name for name, schema in schemas.items() if "additionalProperties" in schema}

    assert not with_app(make_hash_llm(), closed)
    typed = {"completions_api": "typed"}
    assert with_app(make_hash_llm(), closed, **typed) == {"TypedCompletionBody"}
    refusing = with_app(make_hash_llm(), closed, unknown_params="refuse")
    assert {"ChatBody", "Message", "StreamOptions", "SessionBody", "TextPart"} < refusing


def test_every_schema_says_something_about_each_field() -> None:
    for schema in the_document()["components"]["schemas"].values():
        for name, field in schema["properties"].items():
            kinds = field.get("anyOf", [field])
            assert all(kind.keys() - {"title", "default"} for kind in kinds), name


def test_every_route_and_method() -> None:
    """Other methods are refused with an Allow header that has exactly the documented ones."""
    document = the_document()
    gone = asyncio.Event()  # a stream ends at once
    gone.set()

    async def use(app: App) -> None:
        for path, operations in document["paths"].items():
            known = {method.upper() for method in operations}
            at = path.replace("{id}", "x").replace("{name}", "hash-model")
            for method in METHODS:
                reply = await app.send(method, at, leave=gone)
                assert (reply.status == 405) == (method not in known), (method, path)
                if reply.status == 405:
                    assert set(reply.headers["allow"].split(", ")) - {"HEAD"} == known
        assert {"/v1/completions", "/v1/sessions/{id}/fork", "/"} < document["paths"].keys()
        assert len(document["paths"]) == len(
            {route.path for route in app.app.routes if isinstance(route, Route)}
        )

    with_app(make_hash_llm(), use, sessions="sqlite://")


def test_an_answer_that_is_not_documented_is_noticed() -> None:
    async def use(app: App) -> None:
        reply = await app.get("/v1/models")
        scope = {"type": "http", "method": "GET", "path": "/v1/models", "headers": []}
        check_documented(app.app.routes, scope, reply)
        reply.status = 418
        with pytest.raises(AssertionError, match="answers 418"):
            check_documented(app.app.routes, scope, reply)

    with_app(make_hash_llm(), use)


# ---- schemathesis

CHECKS = (
    *("not_a_server_error", "status_code_conformance", "content_type_conformance"),
    *("response_schema_conformance", "response_headers_conformance", "negative_data_rejection"),
    *("unsupported_method", "allow_header_conformance", "ignored_auth"),
)
"""All checks except those that demand that every body of the schema is accepted: some ranges depend
on the model and are not in the document."""


def schemathesis() -> Path:
    """The program, in an environment of its own that is kept between runs."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "infer-tests" / "schemathesis"
    if not (folder / "bin" / "st").exists():
        venv.create(folder, with_pip=True, clear=True)
        subprocess.run([folder / "bin/pip", "install", "-q", "schemathesis>=4.32"], check=True)
    return folder / "bin" / "st"


@pytest.mark.peer
@pytest.mark.timeout(900)
def test_schemathesis(tmp_path: Path) -> None:
    """Valid and invalid bodies, NUL bytes, all phases; with and without a key."""
    from tests.support.server_process import served

    program, keys = schemathesis(), tmp_path / "keys.json"
    (tmp_path / "schemathesis.toml").write_text(SCHEMATHESIS_SETTINGS, encoding="utf-8")
    token = Keys(keys, must_exist=False).create("admin", KeyLimits(admin=True))
    server = [*("-m", "infer.server", "--port", "0", "--max-seq-len", "64")]
    server += ["--sessions", f"sqlite:///{tmp_path}/s.db", "--api-keys", str(keys)]
    with served(server, tmp_path / "log") as running:
        url = f"http://127.0.0.1:{running.port}/openapi.json"
        command = [*(str(program), "run", url, "-H", f"Authorization: Bearer {token}")]
        command += ["--checks", ",".join(CHECKS), "--mode", "all", "--continue-on-failure"]
        command += ["--exclude-path", EVENTS_PATH]  # it has no end
        command += ["--exclude-path", COMPARISONS_PATH]  # takes seconds; test_comparisons.py
        command += ["--generation-allow-x00", "true", "--suppress-health-check", "all"]
        command += ["--generation-database", "none", "--no-color", "--seed", "1"]
        command += ["-n", os.environ.get("INFER_SCHEMATHESIS_EXAMPLES", "50")]
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=tmp_path, encoding="utf-8"
        )
        print(done.stdout[-6000:], done.stderr[-2000:], file=sys.stderr)
    assert done.returncode == 0
    assert "Tested: 2" in done.stdout  # more than twenty operations
    assert "Traceback" not in (tmp_path / "log").read_text(encoding="utf-8")
