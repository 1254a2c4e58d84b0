"""Every field that is refused, on both endpoints: status, param, code, words; no engine step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from infer.engine.client.async_llm import AsyncLLM
from infer.server.openai.completions import CompletionBody
from infer.server.openai.ignored_fields import HINTS, REQUEST_FIELDS
from tests.support.cases import over
from tests.support.doubles import make_hash_llm
from tests.support.serving import (
    BODIES,
    CHAT,
    COMPLETIONS,
    App,
    Reply,
    ask,
    asking,
    chat_body,
    check_refused,
    with_app,
)


def schema_format(schema: dict[str, Any]) -> dict[str, Any]:
    named = {"name": "x", "schema": schema, "strict": True}
    return {"response_format": {"type": "json_schema", "json_schema": named}}


def tool(parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


def choose(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


TOOL = tool({"type": "object"})


# ---- fields that both endpoints have: value → status, param, code, a word of the message
SAME_FIELDS: list[tuple[dict[str, Any], int, str, str | None, str]] = [
    # wrong types: 400
    ({"max_tokens": "5"}, 400, "max_tokens", "invalid_type", "integer"),
    ({"max_tokens": 5.5}, 400, "max_tokens", "invalid_type", "integer"),
    ({"max_tokens": 1e300}, 400, "max_tokens", "invalid_type", "integer"),
    ({"max_tokens": True}, 400, "max_tokens", "invalid_type", "boolean"),
    ({"temperature": "0.5"}, 400, "temperature", "invalid_type", "number"),
    ({"temperature": True}, 400, "temperature", "invalid_type", "boolean"),
    ({"top_p": [1]}, 400, "top_p", "invalid_type", "list"),
    ({"top_k": 1.5}, 400, "top_k", "invalid_type", "integer"),
    ({"min_p": "x"}, 400, "min_p", "invalid_type", "number"),
    ({"seed": "1"}, 400, "seed", "invalid_type", "integer"),
    ({"n": True}, 400, "n", "invalid_type", "boolean"),
    ({"n": 1.5}, 400, "n", "invalid_type", "integer"),
    ({"stream": 1}, 400, "stream", "invalid_type", "true or false"),
    ({"stream": "true"}, 400, "stream", "invalid_type", "true or false"),
    ({"stream_options": 1, "stream": True}, 400, "stream_options", "invalid_type", "object"),
    ({"stop": 5}, 400, "stop", None, "list of strings"),
    ({"stop": ["a", 5]}, 400, "stop", None, "list of strings"),
    ({"stop_token_ids": 3}, 400, "stop_token_ids", "invalid_type", "list"),
    ({"stop_token_ids": [True]}, 400, "stop_token_ids[0]", "invalid_type", "integer"),
    ({"logit_bias": [1]}, 400, "logit_bias", None, "object"),
    ({"logit_bias": {"a": 1}}, 400, "logit_bias", None, "token id"),
    ({"logit_bias": {"1": "a"}}, 400, "logit_bias", None, "number"),
    ({"logit_bias": {"1": True}}, 400, "logit_bias", None, "number"),
    ({"logit_bias": {"1": None}}, 400, "logit_bias", None, "number"),
    ({"logit_bias": {"1": 1, "01": 2}}, 400, "logit_bias", None, "twice"),
    ({"user": 5}, 400, "user", "invalid_type", "string"),
    ({"model": 5}, 400, "model", "invalid_type", "string"),
    ({"metadata": {"a": {"b": 1}}}, 400, "metadata", None, "strings"),
    ({"ignore_eos": 1}, 400, "ignore_eos", "invalid_type", "true or false"),
    ({"stream_format": 1, "stream": True}, 400, "stream_format", "invalid_type", "string"),
    ({"logprobs": "x"}, 400, "logprobs", "invalid_type", "string"),
    # known, but not with this value: 400 by name
    ({"functions": [{}]}, 400, "functions", "unsupported_parameter", "functions"),
    # structured output: the shape is the wire's, the meaning the compiler's
    ({"response_format": 5}, 400, "response_format", None, "an object with a type"),
    ({"response_format": {"type": "xml"}}, 422, "response_format", None, "'json_object'"),
    *(
        (
            {"response_format": {"type": "json_schema", **fields, "json_schema": inner, "z": None}},
            422,
            "response_format.a",
            "unknown_parameter",
            "no field 'a'",
        )
        for fields, inner in (
            ({"a": 1}, {"schema": {}}),
            ({}, {"schema": {}, "a": 1}),
            ({"a": 1, "schema": {}}, None),
        )
    ),
    *(
        (
            {"response_format": {"type": kind, "a": 1, "json_schema": None}},
            422,
            "response_format.a",
            "unknown_parameter",
            "no field 'a'",
        )
        for kind in ("text", "json_object")
    ),
    (
        {"structured_outputs": {"regex": "a", "regexp": 1}},
        *(422, "structured_outputs.regexp", "unknown_parameter", "no field 'regexp'"),
    ),
    ({"response_format": {"type": "json_schema"}}, 400, "response_format", None, "a string"),
    (schema_format({"enum": []}), 400, "response_format", None, "Unsatisfiable schema"),
    (schema_format({"anyOf": [{"$ref": "#"}] * 2}), 400, "response_format", None, "no text"),
    (
        schema_format({"not": {}}),
        *(400, "response_format.json_schema.schema", "invalid_json_schema", "not cannot be"),
    ),
    (schema_format({"const": "x" * 65536}), 400, "response_format", None, "65536"),
    ({"structured_outputs": {}}, 400, "structured_outputs", None, "exactly one"),
    ({"structured_outputs": {"json_object": 1}}, 400, "structured_outputs", None, "true"),
    ({"structured_outputs": {"regex": "("}}, 400, "structured_outputs", None, "invalid regex"),
    ({"structured_outputs": {"choice": []}}, 400, "structured_outputs", None, "at least one"),
    ({"structured_outputs": {"grammar": "aaa"}}, 400, "structured_outputs", None, "Expected ::="),
    ({"guided_json": "{"}, 400, "guided_json", None, "guided_json (json)"),
    ({"guided_regex": 5}, 400, "guided_regex", None, "string"),
    ({"guided_choice": ["a", 1]}, 400, "guided_choice", None, "string"),
    ({"guided_grammar": "start: start"}, 400, "guided_grammar", None, "no text satisfies"),
    (
        {"guided_grammar": '%llguidance {}\nstart: "a"'},
        *(400, "guided_grammar", None, "guided_grammar (grammar): a grammar cannot set options"),
    ),
    (
        {"guided_grammar": f'start: %json {{"type": "integer", "maximum": {-(2**63)}}}'},
        *(400, "guided_grammar", None, "maximum must be above -2**63"),
    ),
    ({"guided_regex": "a", "guided_choice": ["a"]}, 400, "guided_choice", None, "send one"),
    # what may be sampled
    ({"allowed_token_ids": []}, 422, "allowed_token_ids", None, "empty"),
    ({"allowed_token_ids": [262]}, 422, "allowed_token_ids", None, "vocabulary"),
    ({"allowed_token_ids": ["a"]}, 400, "allowed_token_ids[0]", "invalid_type", "integer"),
    ({"allowed_token_ids": [1] * 4097}, 422, "allowed_token_ids", None, "at most 4096"),
    ({"bad_words": ["x" * 257]}, 422, "bad_words", None, "at most 256"),
    ({"bad_words": [5]}, 400, "bad_words", None, "list of strings"),
    ({"bad_words": ["a"] * 65}, 422, "bad_words", None, "at most 64"),
    ({"suffix": "x"}, 400, "suffix", "unsupported_parameter", "suffix"),
    ({"best_of": 2}, 400, "best_of", "unsupported_parameter", "1"),
    ({"best_of": True}, 400, "best_of", "unsupported_parameter", "1"),
    ({"prompt_logprobs": 21}, 422, "prompt_logprobs", None, "between 0 and 20"),
    ({"return_token_ids": 1}, 400, "return_token_ids", "invalid_type", "true or false"),
    ({"reuse_prefix": "no"}, 400, "reuse_prefix", "invalid_type", "true or false"),
    ({"timeout": 0}, 422, "timeout", None, "above 0"),
    ({"timeout": 10**6}, 422, "timeout", None, "at most 86400"),
    ({"timeout": "5"}, 400, "timeout", "invalid_type", "number"),
    ({"modalities": ["audio"]}, 400, "modalities", "unsupported_parameter", "text"),
    ({"audio": {}}, 400, "audio", "unsupported_parameter", "null"),
    ({"prediction": {}}, 400, "prediction", None, "must be"),
    ({"prediction": {"type": "x", "content": "a"}}, 400, "prediction", None, "must be"),
    ({"prediction": {"type": "content", "content": [{}]}}, 400, "prediction", None, "must be"),
    ({"prediction": {"type": "content"}}, 400, "prediction", None, "must be"),
    (
        {"prediction": {"type": "content", "content": "a", "extra": 1}},
        *(422, "prediction.extra", "unknown_parameter", "known are content, type"),
    ),
    (
        {"prediction": {"type": "content", "content": "a" * 262_145}},
        *(422, "prediction", None, "at most 262144"),
    ),
    ({"speculation": "no"}, 400, "speculation", "invalid_type", "true or false"),
    ({"service_tier": "flex"}, 400, "service_tier", "unsupported_parameter", "default"),
    ({"store": True}, 400, "store", "unsupported_parameter", "false"),
    ({"verbosity": "low"}, 400, "verbosity", "unsupported_parameter", "medium"),
    ({"web_search_options": {}}, 400, "web_search_options", "unsupported_parameter", "null"),
    ({"prompt_cache_key": 5}, 400, "prompt_cache_key", "unsupported_parameter", "string"),
    ({"chat_template": "x"}, 400, "chat_template", "unsupported_parameter", "chat_template"),
    (
        {"stream": True, "stream_options": {"include_obfuscation": True}},
        *(400, "stream_options.include_obfuscation", "unsupported_parameter", "false"),
    ),
    ({"stream_options": {"include_usage": True}}, 400, "stream_options", None, "stream: true"),
    ({"stream_format": "events"}, 400, "stream_format", None, "stream: true"),
    # values outside: 422
    ({"max_tokens": 0}, 422, "max_tokens", None, "between 1"),
    ({"max_tokens": -3}, 422, "max_tokens", None, "between 1"),
    ({"max_tokens": 2**63}, 422, "max_tokens", None, "between 1"),
    ({"min_tokens": 9}, 422, "min_tokens", None, "must not exceed"),
    ({"min_tokens": -1}, 422, "min_tokens", None, "between 0"),
    ({"temperature": -1}, 422, "temperature", None, "between 0 and 2"),
    ({"temperature": 1e308}, 422, "temperature", None, "between"),
    ({"temperature": 10**19}, 422, "temperature", None, "between"),
    ({"top_p": -1e-9}, 422, "top_p", None, "between 0 and 1"),
    ({"top_p": 1.0000001}, 422, "top_p", None, "between"),
    ({"top_k": -2}, 422, "top_k", None, "between"),
    ({"top_k": 2**63}, 422, "top_k", None, "between"),
    ({"min_p": 1.5}, 422, "min_p", None, "between"),
    ({"repetition_penalty": 0}, 422, "repetition_penalty", None, "above 0"),
    ({"presence_penalty": 3}, 422, "presence_penalty", None, "between"),
    ({"frequency_penalty": -3}, 422, "frequency_penalty", None, "between"),
    ({"seed": 2**64}, 422, "seed", None, "between"),
    ({"n": 0}, 422, "n", None, "at least 1"),
    ({"n": 129}, 422, "n", None, "at most 128"),
    ({"n": 10**9}, 422, "n", None, "at most 128"),
    ({"priority": 2**31}, 422, "priority", None, "at most"),
    ({"stop": "x" * 257}, 422, "stop", None, "at most 256"),
    ({"stop": ["x"] * 17}, 422, "stop", None, "at most"),
    ({"stop_token_ids": [-1]}, 422, "stop_token_ids", None, "between 0"),
    ({"stop_token_ids": [262]}, 422, "stop_token_ids", None, "vocabulary"),
    ({"stop_token_ids": [1] * 65}, 422, "stop_token_ids", None, "at most 64"),
    ({"logit_bias": {"1": 101}}, 422, "logit_bias", None, "between -100"),
    ({"logit_bias": {"-1": 1}}, 422, "logit_bias", None, "a token id of logit_bias must be"),
    ({"logit_bias": {"-1": 1}}, 422, "logit_bias", None, "between 0"),
    ({"logit_bias": {"262": 1}}, 422, "logit_bias", None, "vocabulary"),
    ({"logit_bias": {str(2**63): 1}}, 422, "logit_bias", None, "between 0"),
    (
        {"logit_bias": {str(i): 1 for i in range(1025)}},
        *(422, "logit_bias", None, "more than 1024"),
    ),
    ({"metadata": {str(i): "x" for i in range(17)}}, 422, "metadata", None, "16"),
    ({"stream_format": "sse", "stream": True}, 422, "stream_format", None, "events"),
    ({"stream_format": "events", "stream": True, "n": 2}, 422, "stream_format", None, "one choice"),
    # names
    ({"model": "gpt-4"}, 404, "model", "model_not_found", "hash-model"),
    ({"model": " "}, 404, "model", "model_not_found", "hash-model"),
    ({"temprature": 1}, 422, "temprature", "unknown_parameter", "'temperature'"),
    ({"qqqq": 1}, 422, "qqqq", "unknown_parameter", "known are"),
    (
        {"stream": True, "stream_options": {"include_usge": True}},
        *(422, "stream_options.include_usge", "unknown_parameter", "'include_usage'"),
    ),
]

COMPLETION_FIELDS: list[tuple[dict[str, Any], int, str, str | None, str]] = [
    ({"prompt": None}, 400, "prompt", "missing_required_parameter", "required"),
    ({"prompt": ""}, 400, "prompt", None, "empty"),
    ({"prompt": []}, 400, "prompt", None, "empty"),
    ({"prompt": [[]]}, 400, "prompt", None, "empty"),
    ({"prompt": [""]}, 400, "prompt", None, "empty"),
    ({"prompt": ["a", ""]}, 400, "prompt", None, "empty"),
    ({"prompt": 5}, 400, "prompt", None, "must be a string"),
    ({"prompt": {}}, 400, "prompt", None, "must be a string"),
    ({"prompt": [True]}, 400, "prompt", None, "must be a string"),
    ({"prompt": [1, 1.5]}, 400, "prompt", None, "must be a string"),
    ({"prompt": ["a", 1]}, 400, "prompt", None, "must be a string"),
    ({"prompt": [[1], "a"]}, 400, "prompt", None, "must be a string"),
    ({"prompt": [["a"]]}, 400, "prompt", None, "must be a string"),
    ({"prompt": [None]}, 400, "prompt", None, "must be a string"),
    ({"prompt": [-1]}, 422, "prompt", None, "vocabulary"),
    ({"prompt": [262]}, 422, "prompt", None, "vocabulary"),
    ({"prompt": [[1], [2**63]]}, 422, "prompt", None, "vocabulary"),
    ({"prompt": ["a"] * 257}, 422, "prompt", None, "256"),
    ({"prompt": ["a"] * 40, "n": 8}, 422, "n", None, "256"),
    ({"prompt": "x" * 512}, 400, "prompt", "context_length_exceeded", "512"),
    ({"prompt": [1] * 512}, 400, "prompt", "context_length_exceeded", "512"),
    ({"prompt": "x" * 10**6}, 400, "prompt", "context_length_exceeded", "512"),
    ({"logprobs": 21}, 422, "logprobs", None, "between 0 and 20"),
    ({"logprobs": -1}, 422, "logprobs", None, "between 0 and 20"),
    ({"logprobs": True}, 400, "logprobs", "invalid_type", "integer"),
    ({"echo": 1}, 400, "echo", "invalid_type", "true or false"),
    ({"messages": []}, 422, "messages", "unknown_parameter", "prompt"),
    ({"tools": [TOOL]}, 400, "tools", "unsupported_parameter", "tools"),
    ({"tool_choice": "required"}, 400, "tool_choice", "unsupported_parameter", "none"),
    ({"max_completion_tokens": 5}, 422, "max_completion_tokens", "unknown_parameter", "max_tokens"),
    (
        {"stream_format": "events", "stream": True, "prompt": ["a", "b"]},
        *(422, "stream_format", None, "one choice"),
    ),
    (
        {"stream_format": "events", "stream": True, "logprobs": 0},
        *(422, "stream_format", None, "logprobs"),
    ),
]


def said(*messages: Any) -> dict[str, Any]:
    return {"messages": list(messages)}


UNSUPPORTED_TEXT = ("unsupported_parameter", "a string")


def part(**fields: Any) -> dict[str, Any]:
    return said({"role": "user", "content": [{"type": "text", "text": "a"}, fields]})


CHAT_FIELDS: list[tuple[dict[str, Any], int, str, str | None, str]] = [
    ({"echo": True}, 400, "echo", "unsupported_parameter", "false"),
    ({"messages": None}, 400, "messages", "missing_required_parameter", "required"),
    ({"messages": []}, 400, "messages", None, "empty"),
    ({"messages": "x"}, 400, "messages", "invalid_type", "list"),
    ({"messages": [5]}, 400, "messages[0]", "invalid_type", "object"),
    (
        said({"role": "user", "content": "x"}, {"role": "user"}),
        *(400, "messages[1].content", "missing_required_parameter", "required"),
    ),
    (
        said({"role": "system", "content": None}),
        *(400, "messages[0].content", "missing_required_parameter", "required"),
    ),
    (said({"content": "x"}), 400, "messages[0].role", "missing_required_parameter", "required"),
    (said({"role": 5, "content": "x"}), 400, "messages[0].role", "invalid_type", "string"),
    (said({"role": "robot", "content": "x"}), 422, "messages[0].role", None, "'user'"),
    (said({"role": "user", "content": 5}), 400, "messages[0].content", None, "text parts"),
    (said({"role": "user", "content": ["x"]}), 400, "messages[0].content", None, "text parts"),
    (
        part(type="image_url", image_url={"url": "http://127.0.0.1/"}),
        *(400, "messages[0].content", "unsupported_content_part", "image_url"),
    ),
    (
        part(type="input_audio"),
        *(400, "messages[0].content", "unsupported_content_part", "input_audio"),
    ),
    (part(text="x"), 400, "messages[0].content", "unsupported_content_part", "no type"),
    (part(type="text"), 400, "messages[0].content", None, "text part"),
    (part(type="text", text=5), 400, "messages[0].content", None, "text part"),
    (part(type=5, text="x"), 400, "messages[0].content", "unsupported_content_part", "no type"),
    (part(type=["text"], text="x"), 400, "messages[0].content", "unsupported_content_part", "no"),
    (
        part(type="text", text="x", extra=1),
        *(422, "messages[0].content.extra", "unknown_parameter", "known are text, type"),
    ),
    (
        part(type="refusal", refusal="x"),
        *(400, "messages[0].content", "unsupported_content_part", "'refusal'"),
    ),
    (
        part(type="thinking", thinking="x"),
        *(400, "messages[0].content", "unsupported_content_part", "'thinking'"),
    ),
    (
        said({"role": "assistant", "content": [{"type": "refusal", "refusal": 5}]}),
        *(400, "messages[0].content", None, "'refusal': string"),
    ),
    (said({"role": "assistant", "refusal": 5}), 400, "messages[0].refusal", *UNSUPPORTED_TEXT),
    (
        said({"role": "assistant", "content": "x", "tool_calls": [{}]}),
        *(400, "messages[0].tool_calls", None, "`function`"),
    ),
    ({"tools": [{"type": "function"}]}, 400, "tools", None, "`function`"),
    ({"reasoning_effort": "huge"}, 422, "reasoning_effort", None, "'minimal'"),
    ({"reasoning_effort": 5}, 400, "reasoning_effort", "invalid_type", "string"),
    (
        {"response_format": {"type": "json_object", "schema": 5}},
        *(400, "response_format", None, "schema must be an object"),
    ),
    (
        {"response_format": {"type": "text", "schema": {}}},
        *(422, "response_format.schema", "unknown_parameter", "no field 'schema'"),
    ),
    ({"tool_choice": "required"}, 400, "tool_choice", None, "none of the tools"),
    ({"tools": [TOOL], "tool_choice": "some"}, 400, "tool_choice", None, "'required'"),
    (
        {"tools": [TOOL], "tool_choice": {**choose("f"), "a": 1}},
        *(422, "tool_choice.a", "unknown_parameter", "no field 'a'"),
    ),
    (
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f", "a": 1}}},
        *(422, "tool_choice.a", "unknown_parameter", "no field 'a'"),
    ),
    (
        {"thinking": {"type": "adaptive", "a": 1}},
        *(422, "thinking.a", "unknown_parameter", "no field 'a'"),
    ),
    ({"tools": [TOOL], "tool_choice": choose("g")}, 400, "tool_choice", None, "none of the tools"),
    (
        {"tools": [tool({"enum": []})], "tool_choice": choose("f")},
        *(400, "tools[0].function.parameters", None, "Unsatisfiable schema"),
    ),
    ({"tools": [tool(5)]}, 400, "tools", None, "a JSON schema"),
    (
        {"tools": [TOOL], "tool_choice": "required", "guided_regex": "a"},
        *(400, "guided_regex", None, "exclude"),
    ),
    (
        said({"role": "user", "content": "x", "nme": "y"}),
        *(422, "messages[0].nme", "unknown_parameter", "'name'"),
    ),
    (
        said(*({"role": "user", "content": "x"} for _ in range(4097))),
        *(422, "messages", None, "4096"),
    ),
    (
        said({"role": "user", "content": "x" * 512}),
        *(400, "messages", "context_length_exceeded", "512"),
    ),
    ({"max_tokens": 5, "max_completion_tokens": 6}, 400, "max_tokens", None, "differ"),
    (
        {"max_tokens": None, "max_completion_tokens": 0},
        *(422, "max_completion_tokens", None, "max_completion_tokens must be"),
    ),
    ({"max_tokens": None, "min_tokens": 512}, 422, "min_tokens", None, "room"),
    ({"top_logprobs": 2}, 400, "top_logprobs", None, "logprobs: true"),
    ({"logprobs": True, "top_logprobs": 21}, 422, "top_logprobs", None, "between 0 and 20"),
    ({"logprobs": True, "top_logprobs": -1}, 422, "top_logprobs", None, "between 0 and 20"),
    ({"logprobs": 1}, 400, "logprobs", "invalid_type", "true or false"),
    ({"prompt": "x"}, 422, "prompt", "unknown_parameter", "'messages'"),
    (
        {"stream_format": "events", "stream": True, "logprobs": True},
        *(422, "stream_format", None, "logprobs"),
    ),
]


FIELD_ROWS = [
    *((path, *row) for path in BODIES for row in SAME_FIELDS),
    *((COMPLETIONS, *row) for row in COMPLETION_FIELDS),
    *((CHAT, *row) for row in CHAT_FIELDS),
]


STREAMED = [
    row
    for row in FIELD_ROWS
    if not {"stream", "stream_options", "stream_format", "prompt_logprobs"} & row[1].keys()
]
Post = Callable[..., Reply]


@pytest.fixture(scope="module")
def engine() -> AsyncLLM:
    return make_hash_llm()


@pytest.fixture(scope="module")
def strict(engine: AsyncLLM) -> Iterator[Post]:
    """Function that sends a body to a path of an app that refuses unknown fields."""
    with asking(engine, unknown_params="refuse") as post:
        yield post


@pytest.fixture(scope="module")
def lenient() -> Iterator[Post]:
    with asking(make_hash_llm()) as post:
        yield post


@over(("path", "fields", "status", "param", "code", "word"), FIELD_ROWS)
def test_a_field_is_refused(
    path: str,
    fields: dict[str, Any],
    status: int,
    param: str,
    code: str | None,
    word: str,
    strict: Post,
    engine: AsyncLLM,
) -> None:
    check_refused(strict(path, BODIES[path](**fields)), status, param, code, word)
    assert engine.stats()["num_submitted"] == 0


@over(("path", "fields", "status", "param", "code", "word"), FIELD_ROWS)
def test_by_default_only_what_is_unknown_or_a_hint_is_left_out(
    path: str,
    fields: dict[str, Any],
    status: int,
    param: str,
    code: str | None,
    word: str,
    lenient: Post,
) -> None:
    reply = lenient(path, BODIES[path](**fields))
    name = param.rpartition(".")[2]
    if code == "unknown_parameter" or (code == "unsupported_parameter" and name in HINTS):
        assert (reply.status, reply.headers["x-ignored-params"]) == (200, name)
    else:
        check_refused(reply, status, param, code, word)


@over(("path", "fields", "status", "param", "code", "word"), STREAMED)
def test_a_field_is_refused_before_a_stream_begins(
    path: str,
    fields: dict[str, Any],
    status: int,
    param: str,
    code: str | None,
    word: str,
    strict: Post,
) -> None:
    check_refused(strict(path, BODIES[path](stream=True, **fields)), status, param, code, word)


INERT = {
    "best_of": 1,
    "echo": False,
    "suffix": "",
    "tools": [],
    "tool_choice": "auto",
    "functions": [],
    "response_format": {"type": "text"},
    "modalities": ["text"],
    "service_tier": "default",
    "store": False,
    "parallel_tool_calls": True,
    "reasoning_effort": "none",
    "verbosity": "medium",
    "prompt_cache_key": "k",
    "safety_identifier": "s",
    "user": "u",
    "metadata": {"a": "b"},
    "length_penalty": 1,
    "chat_template_kwargs": {},
    "add_generation_prompt": True,
}


@pytest.mark.parametrize("path", BODIES)
def test_fields_at_their_value_without_effect(path: str) -> None:
    plain = ask(make_hash_llm(), path, BODIES[path]()).json()
    assert ask(make_hash_llm(), path, BODIES[path](**INERT)).json()["choices"] == plain["choices"]


@pytest.mark.parametrize("path", BODIES)
def test_null_is_absent(path: str) -> None:
    names = {*CompletionBody.model_fields, *REQUEST_FIELDS} - {"prompt", "max_tokens"}
    nulls = {**dict.fromkeys(names), "seed": 1}
    reply = ask(make_hash_llm(), path, BODIES[path](**nulls))
    plain = ask(make_hash_llm(), path, BODIES[path]())
    assert reply.json()["choices"] == plain.json()["choices"]


@pytest.mark.parametrize("path", BODIES)
def test_unknown_names_are_left_out_and_named(path: str) -> None:
    """At most 32 of them and 1 KiB; a name that could forge a header is not repeated."""
    unknown: dict[str, Any] = {"temprature": 5, "\r\nx: y": 1, "": 1, "a" * 65: 1, "ü": 1}
    for i in range(40):
        unknown[f"u{i}"] = [i]

    async def use(app: App) -> None:
        plain = await app.post(path, BODIES[path]())
        assert "x-ignored-params" not in plain.headers
        told = await app.post(path, BODIES[path](**unknown))
        assert told.json()["choices"] == plain.json()["choices"]
        names = told.headers["x-ignored-params"].split(", ")
        assert names == ["temprature", "?", *(f"u{i}" for i in range(27))]
        long = {f"{i:064}": 1 for i in range(32)}
        told = await app.post(path, BODIES[path](**long))
        names = told.headers["x-ignored-params"].split(", ")
        assert (told.status, names) == (200, list(long)[:15])
        options = {"stream": True, "stream_options": {"include_usge": True}}
        streamed = await app.post(path, BODIES[path](**options))
        assert (streamed.status, streamed.headers["x-ignored-params"]) == (200, "include_usge")
        refused = await app.post(path, BODIES[path](echo=5, store=True))
        assert refused.status == 400  # known names stay known

    with_app(make_hash_llm(), use)


OF_OTHER_CLIENTS: dict[str, Any] = {
    # Open WebUI, llama.cpp, Ollama, LM Studio, KoboldCpp
    **{"chat_id": "c", "session": "s", "id": "i", "background_tasks": {}, "features": {}},
    **{
        "repeat_penalty": 1.1,
        "repeat_last_n": 64,
        "num_ctx": 4096,
        "num_predict": 5,
        "mirostat": 0,
    },
    **{"cache_prompt": True, "id_slot": -1, "keep_alive": "5m", "options": {}, "tfs_z": 1.0},
    **{"typical_p": 1.0, "dry_multiplier": 0.0, "samplers": ["top_k"], "n_keep": 0, "ttl": 300},
    # OpenRouter, Qwen, LiteLLM, LangChain
    **{"provider": {"order": ["a"]}, "transforms": ["middle-out"], "usage": {"include": True}},
    **{"models": ["a"], "route": "fallback", "plugins": [], "reasoning": {"effort": "low"}},
    **{"enable_thinking": False, "thinking_budget": 5, "thinking": {"type": "disabled"}},
    **{"extra_body": {}, "extra_headers": {}, "litellm_metadata": {}, "input_type": "query"},
    # OpenAI
    **{"store": True, "verbosity": "low", "service_tier": "flex", "include": ["x"]},
    **{"prompt_cache_retention": "24h"},
}
"""Fields that common clients send and that have no meaning here."""


WITHOUT_A_MEANING = [
    (path, name)
    for path in BODIES
    for name in OF_OTHER_CLIENTS
    if path == COMPLETIONS or name not in ("enable_thinking", "thinking")
]


@over(("path", "name"), WITHOUT_A_MEANING)
def test_what_other_clients_send_is_named(
    path: str, name: str, strict: Post, lenient: Post
) -> None:
    reply = lenient(path, BODIES[path](**{name: OF_OTHER_CLIENTS[name]}))
    assert (reply.status, reply.headers["x-ignored-params"]) == (200, name)
    assert reply.json()["choices"] == lenient(path, BODIES[path]()).json()["choices"]
    refused = strict(path, BODIES[path](**{name: OF_OTHER_CLIENTS[name]}))
    assert refused.error()["param"] == name


def prompt_of(*messages: Any) -> tuple[str, str | None]:
    """The prompt that a chat becomes, and what was ignored for it."""
    path = "/v1/chat/completions/render"
    reply = ask(make_hash_llm(), path, chat_body(messages=list(messages)))
    assert reply.status == 200, reply.body
    return reply.json()["prompt"], reply.headers.get("x-ignored-params")


MARKS = {"cache_control": {"type": "ephemeral"}, "annotations": [], "id": "p", "\nx: y": [1]}


@pytest.mark.parametrize("role", ["system", "user", "assistant"])
@pytest.mark.parametrize("kind", ["text", "input_text", "output_text"])
def test_members_of_parts_and_messages_without_a_meaning_are_named(role: str, kind: str) -> None:
    user = {"role": "user", "content": "b"}
    plain, _ = prompt_of({"role": role, "content": "one two"}, user)
    parts = [{"type": kind, "text": "one ", **MARKS}, {"text": "two", "id": None, "type": kind}]
    prompt, ignored = prompt_of({"role": role, "content": parts, "reasoning_details": [1]}, user)
    assert (prompt, ignored) == (plain, "reasoning_details, cache_control, annotations, id, ?")


def test_what_an_assistant_refused_and_thought_is_no_end_of_a_conversation() -> None:
    user = {"role": "user", "content": "b"}
    plain, _ = prompt_of(user, {"role": "assistant", "content": "no"}, user)
    parts = [{"type": "thinking", "thinking": "x"}, {"type": "refusal", "refusal": "no"}]
    assert prompt_of(user, {"role": "assistant", "content": parts}, user) == (plain, "thinking")
    for beside in ({"content": None}, {}):
        refused = {"role": "assistant", "refusal": "no", **beside}
        assert prompt_of(user, refused, user) == (plain, None)
    both = {"role": "assistant", "content": "no", "refusal": "", "annotations": [{}]}
    assert prompt_of(user, both, user) == (plain, None)


def test_marks_in_a_prediction() -> None:
    parts = [{"type": "text", "text": "a", **MARKS}]
    body = chat_body(prediction={"type": "content", "content": parts, "mark": 1})
    reply = ask(make_hash_llm(), CHAT, body)
    assert reply.headers["x-ignored-params"] == "mark, cache_control, annotations, id, ?"
